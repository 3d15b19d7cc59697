// shm_model.cc: the exchange of rounds between processes, and the futex with which they wake each other, on the model's
// memory.
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/watch.h"
#include "model/scenarios.h"
#include "shm/exchange/exchange.h"

namespace jax_ring::cpu {
namespace {

void sum(const Inputs& inputs, const Outputs& outputs, size_t count, bool) {
  for (int i = 0; i < inputs.count; ++i) watch_read(inputs.buffers[i], count * sizeof(uint32_t));
  for (int i = 0; i < outputs.count; ++i) watch_write(outputs.buffers[i], count * sizeof(uint32_t));
  for (size_t at = 0; at < count; ++at) {
    uint32_t total = 0;
    for (int i = 0; i < inputs.count; ++i) total += static_cast<const uint32_t*>(inputs.buffers[i])[at];
    for (int i = 0; i < outputs.count; ++i) static_cast<uint32_t*>(outputs.buffers[i])[at] = total;
  }
}

void copy(const Inputs& inputs, const Outputs& outputs, size_t count, bool) {
  watch_read(inputs.buffers[0], count);
  for (int i = 0; i < outputs.count; ++i) {
    watch_write(outputs.buffers[i], count);
    std::memmove(outputs.buffers[i], inputs.buffers[0], count);
  }
}

FoldKernels model_kernels() {
  FoldKernels table{};
  table.kernels[static_cast<int>(Op::sum)][static_cast<int>(DType::u32)] = sum;
  table.kernels[static_cast<int>(Op::sum)][static_cast<int>(DType::u8)] = copy;
  return table;
}

}  // namespace

// Replace those in ffi/cpu.
const FoldKernels& fold_kernels() {
  static const FoldKernels table = model_kernels();
  return table;
}
size_t element_size(DType) { return sizeof(uint32_t); }
void ReturnToPool::operator()(Rendezvous* rendezvous) const { delete rendezvous; }

}  // namespace jax_ring::cpu

namespace jax_ring::shm {
namespace {

using model::NamedScenario;
using model::Options;

// Larger segments, and which processes cannot map them.
class ModelSegments {
 public:
  ModelSegments(std::set<int> refusing, uint32_t first_refused)
      : refusing_(std::move(refusing)), first_refused_(first_refused) {}

  Memory create(uint32_t number, size_t bytes) {
    auto block = std::make_shared<std::vector<unsigned char>>(bytes + kAlignment);
    const uintptr_t at = reinterpret_cast<uintptr_t>(block->data());
    const Memory memory(block, block->data() + (kAlignment - at % kAlignment) % kAlignment);
    model::name_memory(memory.get(), bytes, "segment " + std::to_string(number));
    kept_.push_back(memory);  // the model's memory is unlimited
    return named_[number] = memory;
  }
  Memory open(int process, uint32_t number) const {
    if (refusing_.count(process) > 0 && number >= first_refused_) return nullptr;
    model::require(named_.count(number) > 0, "no such segment");
    return named_.at(number);
  }
  void unlink(uint32_t number) { named_.erase(number); }

  static constexpr size_t kAlignment = 128;

 private:
  const std::set<int> refusing_;
  const uint32_t first_refused_;  // number of a segment
  std::map<uint32_t, Memory> named_;
  std::vector<Memory> kept_;
};

// As seen by one process.
class ViewOfSegments final : public Segments {
 public:
  ViewOfSegments(ModelSegments& all, int self) : all_(all), self_(self) {}
  Memory connect(size_t, const Stop&) override { return nullptr; }
  Memory create(uint32_t number, size_t bytes) override { return all_.create(number, bytes); }
  Memory open(uint32_t number, size_t) override { return all_.open(self_, number); }
  void unlink(uint32_t number) override { all_.unlink(number); }
  std::optional<CallFailure> failure_of(int) override { return std::nullopt; }
  void clean_up(const Stop&) override {}

 private:
  ModelSegments& all_;
  const int self_;
};

constexpr uint32_t kBefore = 0xa5a5a5a5u;  // in the results before a call

// Every process but the first gets its predecessor's operand.
constexpr int kFromTheOneBefore[] = {kNoRank, 0, 1};

// Slices of operands of 32 elements: nearly all of the first process's for the second, and a little back and to itself.
constexpr Part kSlices[] = {{{1, 1}, 4, {0, 1}, 0, 2}, {{0, 1}, 1, {1, 1}, 0, 30}, {{1, 1}, 31, {1, 1}, 31, 1}};

struct TestCall {
  Plan plan;
  bool one_shot;
  size_t count;  // elements of each rank's operand
};

// Processes of one rank each, and their calls.
class Processes {
 public:
  Processes(int num_processes, std::vector<TestCall> calls, uint32_t first_round, Capacities capacities,
            std::set<int> refusing, bool releases)
      : capacities_(std::move(capacities)),
        calls_(std::move(calls)),
        first_round_(first_round),
        releases_(releases),
        segments_(std::move(refusing), releases ? 2 : 1),
        buffers_(num_processes) {
    const size_t bytes = Channel::bytes(num_processes, capacities_);
    memory_.assign(bytes + kAlignment, 0);
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.data());
    shared_ = memory_.data() + (kAlignment - at % kAlignment) % kAlignment;
    model::name_memory(shared_, bytes, "shared memory");
    for (int process = 0; process < num_processes; ++process) {
      Channel channel(shared_, num_processes, process, capacities_);
      channel.signal_staged(first_round - 1, 0);
      channel.skip_results(first_round - 1);
      for (size_t call = 0; call < calls_.size(); ++call) {
        Buffers buffers;
        for (size_t i = 0; i < calls_[call].count; ++i) buffers.input.push_back(value(call, process, i));
        buffers.output.assign(result_count(calls_[call].plan, num_processes, calls_[call].count), kBefore);
        buffers_[process].push_back(std::move(buffers));
      }
    }
  }

  // orders: the order in which each process's calls become ready.
  void spawn(std::vector<std::vector<size_t>> orders) {
    for (int process = 0; process < num_processes(); ++process) {
      model::spawn("process " + std::to_string(process), [=] { run(process, orders[process]); });
    }
  }

  void expect_results() const {
    for (size_t call = 0; call < calls_.size(); ++call) {
      for (int process = 0; process < num_processes(); ++process) {
        const std::vector<uint32_t>& got = buffers_[process][call].output;
        for (size_t i = 0; i < got.size(); ++i) {
          model::require(got[i] == expected(call, process, i), "wrong result of process " + std::to_string(process) +
                                                                   " in call " + std::to_string(call) + " at " +
                                                                   std::to_string(i));
        }
      }
    }
  }

 private:
  struct Buffers {
    std::vector<uint32_t> input, output;
  };

  static constexpr size_t kAlignment = ModelSegments::kAlignment;
  static constexpr uint64_t kFirstId = 100;

  int num_processes() const { return static_cast<int>(buffers_.size()); }
  static uint32_t value(size_t call, int process, size_t i) {
    return static_cast<uint32_t>((call * 256 + i + 1) << (12 * process));
  }
  uint32_t expected(size_t call, int process, size_t i) const {
    const size_t count = calls_[call].count;
    switch (calls_[call].plan.collective) {
      case Collective::all_gather:
        return value(call, static_cast<int>(i / count), i % count);
      case Collective::all_to_all: {
        const size_t block = count / num_processes();
        return value(call, static_cast<int>(i / block), process * block + i % block);
      }
      case Collective::permute: {
        const int source = calls_[call].plan.sources[process];
        return source == kNoRank ? 0 : value(call, source, i);
      }
      case Collective::ragged_all_to_all:
        for (int slice = 0; slice < calls_[call].plan.num_slices; ++slice) {
          const Part& part = calls_[call].plan.slices[slice];
          if (part.receivers.first != process || i < part.to || i >= part.to + part.count) continue;
          return value(call, part.sources.first, i - part.to + part.from);
        }
        return kBefore;
      case Collective::reduce_scatter:
        i += process * (count / num_processes());
        break;
      default:
        break;
    }
    uint32_t total = 0;
    for (int source = 0; source < num_processes(); ++source) total += value(call, source, i);
    return total;
  }

  Call call_of(int process, size_t index) {
    Call call;
    call.rendezvous = cpu::RendezvousPtr(new cpu::Rendezvous, {nullptr});
    const int p = num_processes();
    call.rendezvous->inputs.assign(2 * p, nullptr);
    call.rendezvous->outputs.assign(p, nullptr);
    Buffers& buffers = buffers_[process][index];
    call.rendezvous->inputs[process] = call.rendezvous->inputs[process + p] = buffers.input.data();
    call.rendezvous->outputs[process] = buffers.output.data();
    call.message = {DType::u32, {calls_[index].count}, calls_[index].plan, Op::sum};
    call.id = kFirstId + index;
    call.one_shot = calls_[index].one_shot;
    return call;
  }

  // Like shm/group/communicator.cc, but without deadlines and threads: all processes but the first switch to the call
  // that the first one has begun.
  void run(int process, std::vector<size_t> ready) {
    std::vector<int64_t> ids;
    for (int i = 0; i < num_processes(); ++i) ids.push_back(i);
    const Group group(ids, process);
    ViewOfSegments segments(segments_, process);
    Channel channel(shared_, num_processes(), process, capacities_, &segments);
    uint32_t round = first_round_;
    std::vector<std::unique_ptr<Exchange>> calls;
    for (size_t index : ready) {
      calls.push_back(std::make_unique<Exchange>(group));
      calls.back()->begin(call_of(process, index));
    }
    size_t current = 0;
    while (!calls.empty()) {
      Exchange& exchange = *calls[current];
      if (!advance(exchange, channel, round)) {
        // The leader's call, among the ready ones.
        const uint64_t wanted = *channel.staged_call(0, round);
        exchange.restart();
        for (current = 0; calls[current]->call().id != wanted;) ++current;
        continue;
      }
      round += exchange.num_rounds();
      if (releases_) channel.release_idle();
      calls.erase(calls.begin() + current);
      current = 0;
    }
  }

  // Returns whether the call is done; false: the leader has begun another one.
  static bool advance(Exchange& exchange, Channel& channel, uint32_t round) {
    const auto is_done = [&] { return exchange.advance(channel, round) == Exchange::State::done; };
    const auto is_preempted = [&] {
      if (!exchange.is_waiting_for_leader()) return false;
      const auto other = channel.staged_call(0, round);
      return other && *other != exchange.call().id;
    };
    while (!is_done()) {
      const int peer = exchange.awaited_peer();
      const uint32_t seen = channel.doorbell(peer);
      if (is_done()) return true;
      if (exchange.awaited_peer() != peer) continue;
      if (is_preempted()) return false;
      channel.wait_doorbell(peer, seen, {});
    }
    return true;
  }

  const Capacities capacities_;
  const std::vector<TestCall> calls_;
  const uint32_t first_round_;
  const bool releases_;  // whether the group is idle between calls
  ModelSegments segments_;
  std::vector<unsigned char> memory_;
  unsigned char* shared_;
  std::vector<std::vector<Buffers>> buffers_;  // by process, then call
};

// The count of rounds wraps around after the first one.
constexpr uint32_t kFirstRound = 0xffffffff;

const Capacities kFixed{{64, 64}}, kGrowing{{64, 64}, {128, 128}};

std::function<void()> succeeds(int num_processes, std::vector<TestCall> calls,
                               std::vector<std::vector<size_t>> orders = {}, const Capacities& capacities = kFixed,
                               const std::set<int>& refusing = {}, bool releases = false) {
  std::vector<size_t> in_order;
  for (size_t i = 0; i < calls.size(); ++i) in_order.push_back(i);
  orders.resize(num_processes, in_order);
  return [=] {
    const auto processes =
        std::make_shared<Processes>(num_processes, calls, kFirstRound, capacities, refusing, releases);
    processes->spawn(orders);
    model::at_end([processes] { processes->expect_results(); });
  };
}

// One of two processes aborts the group. The other learns of it before it starts a call, or while it waits in one, and
// then knows who did it.
void aborts() {
  static constexpr int kAborts = 0, kHears = 1;
  const size_t bytes = Channel::bytes(2, kFixed);
  const auto segments = std::make_shared<ModelSegments>(std::set<int>{}, 1);
  const Memory memory = segments->create(1, bytes);
  model::spawn("process 0", [=] { Channel(memory.get(), 2, kAborts, kFixed).abort(); });
  model::spawn("process 1", [=] {
    const Channel channel(memory.get(), 2, kHears, kFixed);
    if (channel.has_notice_of_abort()) {
      model::require(channel.has_aborted(kAborts), "a notice came before what it is of");
      return;
    }
    for (;;) {
      const uint32_t seen = channel.doorbell(kAborts);
      if (channel.has_aborted(kAborts)) break;
      channel.wait_doorbell(kAborts, seen, {});
    }
  });
}

std::vector<NamedScenario> scenarios() {
  Options exhaustive, random;
  random.exhaustive = false;
  random.max_executions = 1000;
  const TestCall one_step{{}, true, 3}, two_steps{{}, false, 32};
  const TestCall tiny{{}, true, 1}, tiny_gather{{Collective::all_gather}, false, 1};
  const TestCall large{{}, true, 32};  // two rounds, or one after growth
  const TestCall scatter{{Collective::reduce_scatter}, false, 16}, gather{{Collective::all_gather}, false, 3};
  const TestCall swap{{Collective::all_to_all}, false, 48};
  const TestCall shift{{Collective::permute, Order::rank, 0, kFromTheOneBefore}, false, 32};
  const TestCall ragged{
      {Collective::ragged_all_to_all, Order::rank, 0, nullptr, kSlices, std::size(kSlices)}, false, 32};
  return {
      {"an abort, 2 processes", exhaustive, aborts},
      {"one round in one step, 2 processes", exhaustive, succeeds(2, {one_step})},
      {"one round in two steps, 2 processes", exhaustive, succeeds(2, {two_steps})},
      {"tiny rounds, 2 processes", random, succeeds(2, {tiny, tiny_gather, tiny})},
      {"2 rounds in one step, 2 processes", exhaustive, succeeds(2, {{{}, true, 32}})},
      {"3 rounds in one step, 2 processes", random, succeeds(2, {{{}, true, 48}})},
      {"3 rounds in two steps, 2 processes", random, succeeds(2, {{{}, false, 96}})},
      {"calls of every kind, 3 processes", random,
       succeeds(3, {one_step, two_steps, scatter, gather, swap, shift, tiny, ragged, one_step})},
      {"an all-to-all, 2 processes", exhaustive, succeeds(2, {swap})},
      {"a permutation, 2 processes", exhaustive, succeeds(2, {shift})},
      {"a ragged all-to-all, 2 processes", exhaustive, succeeds(2, {ragged})},
      {"exchanges, 3 processes", random, succeeds(3, {swap, shift, ragged, shift})},
      {"another order of calls, 2 processes", exhaustive, succeeds(2, {one_step, gather}, {{0, 1}, {1, 0}})},
      {"another order of calls, 3 processes", random,
       succeeds(3, {one_step, gather, one_step}, {{0, 1, 2}, {1, 2, 0}, {2, 1, 0}})},
      {"growth, 2 processes", exhaustive, succeeds(2, {large}, {}, kGrowing)},
      {"growth that a process refuses, 2 processes", random, succeeds(2, {large}, {}, kGrowing, {1})},
      {"growth and other calls, 2 processes", random,
       succeeds(2, {one_step, large, one_step}, {{0, 1, 2}, {1, 0, 2}}, kGrowing)},
      {"growth and other calls, 3 processes", random,
       succeeds(3, {large, two_steps, large}, {{0, 1, 2}, {1, 0, 2}, {2, 1, 0}}, kGrowing)},
      {"growth and idle times, 2 processes", random,
       succeeds(2, {large, one_step, large, one_step}, {}, kGrowing, {}, true)},
      {"growth, idle times and a refusal, 3 processes", random,
       succeeds(3, {large, large, one_step}, {}, kGrowing, {2}, true)},
      {"growth and idle times, 3 processes", random,
       succeeds(3, {large, two_steps, large}, {{0, 1, 2}, {1, 0, 2}, {2, 1, 0}}, kGrowing, {}, true)},
      {"growth that a process refuses, 3 processes", random, succeeds(3, {large, one_step}, {}, kGrowing, {2})},
  };
}

}  // namespace
}  // namespace jax_ring::shm

int main(int argc, char** argv) { return jax_ring::model::run_scenarios(jax_ring::shm::scenarios(), argc, argv); }
