// processes.h: the processes of a group, simulated by threads that share one block of memory, and their calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/rendezvous/completion_threads.h"
#include "shm/exchange/channel.h"
#include "shm/group/communicator.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::shm {

using namespace cpu::testing;
using cpu::element_size;
using cpu::Rendezvous;
using cpu::RendezvousPtr;

inline const Capacities kSmall{{4096, 2048}};  // so that most calls take several rounds
// Like in Communicators, but smaller.
inline const Capacities kGrowing{{2048, 1024}, {8192, 4096}, {32768, 16384}};

inline Memory zeroed_memory(size_t bytes) {
  Memory memory(static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(4096))),
                [](unsigned char* block) { ::operator delete(block, std::align_val_t(4096)); });
  std::memset(memory.get(), 0, bytes);
  return memory;
}

// The segments of simulated processes, and refusals for them.
struct Heap {
  Memory first;
  std::mutex mutex;
  std::map<uint32_t, Memory> larger;    // with a name
  std::map<int, CallFailure> failures;  // of processes that could not map the first
  size_t room = SIZE_MAX;               // for larger segments
  std::set<int> cannot_open;            // processes
  Memory last;                          // larger segment
  std::function<void()> after_create;   // of a larger segment, before its creator learns of it
  int num_created = 0, num_refused = 0, num_opened = 0;
};

class HeapSegments final : public Segments {
 public:
  HeapSegments(std::shared_ptr<Heap> heap, int self) : heap_(std::move(heap)), self_(self) {}

  Memory connect(size_t, const Stop&) override {
    std::lock_guard<std::mutex> lock(heap_->mutex);
    if (const auto found = heap_->failures.find(self_); found != heap_->failures.end()) {
      throw CallError(found->second);
    }
    return heap_->first;
  }
  Memory create(uint32_t number, size_t bytes) override {
    Memory memory = zeroed_memory(bytes);
    {
      std::lock_guard<std::mutex> lock(heap_->mutex);
      if (bytes > heap_->room) return ++heap_->num_refused, nullptr;
      ++heap_->num_created;
      heap_->last = heap_->larger[number] = memory;
    }
    if (heap_->after_create) heap_->after_create();
    return memory;
  }
  Memory open(uint32_t number, size_t) override {
    std::lock_guard<std::mutex> lock(heap_->mutex);
    ++heap_->num_opened;
    const auto found = heap_->larger.find(number);
    return heap_->cannot_open.count(self_) > 0 || found == heap_->larger.end() ? nullptr : found->second;
  }
  void unlink(uint32_t number) override {
    std::lock_guard<std::mutex> lock(heap_->mutex);
    heap_->larger.erase(number);
  }
  std::optional<CallFailure> failure_of(int process) override {
    std::lock_guard<std::mutex> lock(heap_->mutex);
    const auto found = heap_->failures.find(process);
    return found == heap_->failures.end() ? std::nullopt : std::optional(found->second);
  }
  void clean_up(const Stop&) override {}

 private:
  const std::shared_ptr<Heap> heap_;
  const int self_;
};

// A group's processes, given each rank's process.
class Processes {
 public:
  // rounds_without_results: how many rounds the count of results lags behind at the start.
  explicit Processes(std::vector<int64_t> process_of_rank, Capacities capacities = kSmall, uint32_t first_round = 1,
                     uint32_t rounds_without_results = 0)
      : process_of_rank_(std::move(process_of_rank)) {
    const int count = static_cast<int>(1 + *std::max_element(process_of_rank_.begin(), process_of_rank_.end()));
    heap_->first = zeroed_memory(Channel::bytes(count, capacities));
    for (int64_t process = 0; process < count; ++process) {
      Group group(process_of_rank_, process);
      if (first_round != 1) {
        Channel channel(heap_->first.get(), count, group.self(), capacities);
        channel.signal_staged(first_round - 1, 0);
        channel.skip_results(first_round - 1 - rounds_without_results);
      }
      auto segments = std::make_unique<HeapSegments>(heap_, group.self());
      communicators_.push_back(
          std::make_unique<Communicator>(std::move(group), capacities, std::move(segments), first_round));
    }
  }

  int num_ranks() const { return static_cast<int>(process_of_rank_.size()); }
  int count() const { return static_cast<int>(communicators_.size()); }
  const Group& group(int process) const { return communicators_[process]->group(); }
  Communicator& operator[](int process) { return *communicators_[process]; }
  Heap& heap() { return *heap_; }
  void end(int process) { communicators_[process].reset(); }

 private:
  std::vector<int64_t> process_of_rank_;
  const std::shared_ptr<Heap> heap_ = std::make_shared<Heap>();
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// One call, with random operands and the results of all ranks.
class GroupCall {
 public:
  // A rank's result, from all ranks' operands, which have `count` elements, or as many per slot.
  using Expected = std::function<Bytes(const std::vector<Bytes>& operands, size_t count, int rank)>;

  GroupCall(cpu::Message message, int num_ranks, bool in_place, bool one_shot, uint64_t id, Expected expected)
      : message_(std::move(message)),
        expected_(std::move(expected)),
        num_ranks_(num_ranks),
        one_shot_(one_shot),
        in_place_(in_place),
        id_(id),
        outcomes_(num_ranks) {
    const size_t num_slots = message_.tree == nullptr ? 1 : message_.tree->num_slots();
    for (size_t count : message_.counts) {
      const auto seed = static_cast<unsigned>(count + id);
      operands_.push_back(random_elements(message_.dtype, num_ranks, num_slots * count, seed));
      inputs_.emplace_back();
      outputs_.emplace_back();
      const size_t results = message_.num_results * result_count(message_.plan, num_ranks, count);
      for (const Bytes& of_rank : operands_.back()) {
        inputs_.back().emplace_back(of_rank, 0);
        outputs_.back().emplace_back(Bytes(results * element_size(message_.dtype), 0xa5), 0);
      }
    }
  }

  // Submits the call for one process's ranks.
  void submit(Communicator& communicator, uint64_t id) {
    RendezvousPtr rendezvous(new Rendezvous);
    rendezvous->run_id = run_id_;
    rendezvous->done.resize(num_ranks_);
    const std::vector<int>& ranks = communicator.group().ranks_of(communicator.group().self());
    for (int rank : ranks) rendezvous->done[rank] = outcomes_[rank].completion();
    const auto local = [&](int rank) { return communicator.group().is_local(rank); };
    for (size_t operand = 0; operand < message_.counts.size(); ++operand) {
      for (int i = 0; i < 2 * num_ranks_; ++i) {
        const int rank = i % num_ranks_;
        rendezvous->inputs.push_back(local(rank) ? inputs_[operand][rank].data() : nullptr);
      }
      for (int rank = 0; rank < num_ranks_; ++rank) {
        rendezvous->outputs.push_back(local(rank) ? results(operand)[rank].data() : nullptr);
      }
    }
    const auto text = std::make_shared<std::string>("call " + std::to_string(id));
    rendezvous = communicator.submit({std::move(rendezvous), message_, id, one_shot_, text});
    if (rendezvous != nullptr) cpu::CompletionThreads::instance().complete(std::move(rendezvous));
  }
  void submit(Communicator& communicator) { submit(communicator, id_); }

  const Outcome& outcome(int rank) const { return outcomes_[rank]; }

  void expect_results() {
    std::vector<int> all;
    for (int rank = 0; rank < num_ranks_; ++rank) all.push_back(rank);
    expect_results_of(all);
  }
  // This process's buffers, if the others are real processes.
  void expect_results_of(const Group& group) { expect_results_of(group.ranks_of(group.self())); }

  void expect_results_of(const std::vector<int>& ranks) {
    for (int rank : ranks) {
      ASSERT_TRUE(outcomes_[rank].wait());
      ASSERT_EQ(outcomes_[rank].error(), "");
    }
    for (size_t operand = 0; operand < message_.counts.size(); ++operand) {
      for (int rank : ranks) {
        SCOPED_TRACE(describe(message_.plan, num_ranks_, message_.counts[operand]));
        const Bytes want = expected_(operands_[operand], message_.counts[operand], rank);
        const auto difference = first_difference(message_.dtype, results(operand)[rank].data(), want.data(),
                                                 want.size() / element_size(message_.dtype));
        ASSERT_FALSE(difference) << "rank " << rank << ", operand " << operand << ", element " << *difference;
      }
    }
  }

 private:
  std::vector<OffsetBuffer>& results(size_t operand) { return (in_place_ ? inputs_ : outputs_)[operand]; }

  const cpu::Message message_;
  const Expected expected_;
  const int num_ranks_;
  const bool one_shot_, in_place_;
  const uint64_t id_;
  const int64_t run_id_ = next_run_id();
  std::vector<std::vector<Bytes>> operands_;                 // by operand, then rank
  std::vector<std::vector<OffsetBuffer>> inputs_, outputs_;  // likewise
  std::vector<Outcome> outcomes_;
};

// Runs one function per process, each on its own thread.
inline void on_all(int count, const std::function<void(int process)>& run) {
  std::vector<std::thread> threads;
  for (int process = 0; process < count; ++process) threads.emplace_back(run, process);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jax_ring::shm
