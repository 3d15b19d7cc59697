// processes.h: the processes of a group, simulated by threads that share one block of memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "shm/channel.h"
#include "shm/communicator.h"

namespace jax_ring::shm {

inline constexpr Capacity kSmall{4096, 2048};  // so that most calls take several rounds

// The processes of a group, given the process of each rank.
class Processes {
 public:
  // rounds_without_results: how many rounds the count of results is behind at the start.
  explicit Processes(std::vector<int64_t> process_of_rank, Capacity capacity = kSmall, uint32_t first_round = 1,
                     uint32_t rounds_without_results = 0)
      : process_of_rank_(std::move(process_of_rank)) {
    const int count = static_cast<int>(1 + *std::max_element(process_of_rank_.begin(), process_of_rank_.end()));
    const size_t bytes = Channel::bytes(count, capacity);
    Memory memory(static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(4096))),
                  [](unsigned char* block) { ::operator delete(block, std::align_val_t(4096)); });
    std::memset(memory.get(), 0, bytes);
    for (int64_t process = 0; process < count; ++process) {
      Group group(process_of_rank_, process);
      if (first_round != 1) {
        Channel channel(memory.get(), count, group.self(), capacity);
        channel.signal_staged(first_round - 1, 0);
        channel.skip_results(first_round - 1 - rounds_without_results);
      }
      communicators_.push_back(std::make_unique<Communicator>(
          std::move(group), capacity, [memory](const Communicator::Stop&) { return memory; }, first_round));
    }
  }

  int num_ranks() const { return static_cast<int>(process_of_rank_.size()); }
  int count() const { return static_cast<int>(communicators_.size()); }
  const Group& group(int process) const { return communicators_[process]->group(); }
  Communicator& operator[](int process) { return *communicators_[process]; }
  void end(int process) { communicators_[process].reset(); }

 private:
  std::vector<int64_t> process_of_rank_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Runs one function per process, each on its own thread.
inline void on_all(int count, const std::function<void(int process)>& run) {
  std::vector<std::thread> threads;
  for (int process = 0; process < count; ++process) threads.emplace_back(run, process);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jax_ring::shm
