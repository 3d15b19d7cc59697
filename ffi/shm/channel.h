// channel.h: the shared memory of a group of processes: staged values, results, and the signals between them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/futex.h"
#include "shm/rounds.h"

namespace jax_ring::shm {

// Rounds are counted from 1, over all calls, and the count may wrap around.
inline bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

// One process's view of the memory. Zeroed memory is a channel before its first round.
//
// Two sets of staging and results alternate. This is safe as long as a process
//   - stages round n only after it has finished round n-2, and after every process has staged round n-1 or published
//     its results of round n-2;
//   - writes results only after every process has staged the round, and stages the first round of a call only after it
//     has finished the call before.
class Channel {
 public:
  static size_t bytes(int num_processes, const Capacity& capacity);

  Channel(unsigned char* memory, int num_processes, int self, const Capacity& capacity);

  unsigned char* staging(int process, uint32_t round) const { return set(process, round); }
  unsigned char* results(int process, uint32_t round) const { return set(process, round) + capacity_.staging; }

  // Publishes that this process has staged a round, and for which call. It may stage the same round again for another
  // call until every process has staged that round for the same call.
  void signal_staged(uint32_t round, uint64_t call);
  bool has_staged(int process, uint32_t round, uint64_t call) const;
  // The call for which a process has staged the round, if it has.
  std::optional<uint64_t> staged_call(int process, uint32_t round) const;

  void signal_results(uint32_t round);
  bool has_results(int process, uint32_t round) const;
  // Used instead in a round without results. Without it the count would fall 2^31 rounds behind the others, and then
  // compare as ahead of them.
  void skip_results(uint32_t round);

  // The text that other processes report when they wait for this one, truncated to the space there is.
  void post_status(const std::string& text);
  std::string status_of(int process) const;

  // Aborts the group for all processes. leaves: this process makes no more calls at all, and its status is a predicate
  // that says why.
  void abort(bool leaves = false);
  bool has_aborted(int process) const;
  bool has_left(int process) const;

  // Publishes this process's identity; whether `process` has done so; and whether it is known to have exited.
  void join();
  bool has_joined(int process) const;
  bool has_exited(int process) const;

  // A count that changes with every signal of `process`, and a wait for it to change.
  uint32_t doorbell(int process) const;
  void wait_doorbell(int process, uint32_t seen, std::chrono::nanoseconds timeout) const;

 private:
  // Written only by the process that owns the area. Everything that is polled is in one line.
  struct alignas(128) Signals {
    Atomic<uint32_t> doorbell, staged, results, aborted;
    Atomic<uint64_t> calls[2];  // of the latest even and odd round
  };
  // Written by the processes that wait for the owner.
  struct alignas(128) Waiters {
    Atomic<uint32_t> count;
  };
  struct alignas(128) Status {
    Atomic<int64_t> pid, pid_namespace, start_time;
    Atomic<uint32_t> length;
    char text[1024];
  };
  struct Area {
    Signals signals;
    Waiters waiters;
    Status status;
  };

  Area& area(int process) const { return *reinterpret_cast<Area*>(memory_ + process * area_bytes(capacity_)); }
  unsigned char* set(int process, uint32_t round) const {
    return memory_ + process * area_bytes(capacity_) + sizeof(Area) +
           round % 2 * (capacity_.staging + capacity_.results);
  }
  static size_t area_bytes(const Capacity& capacity) {
    return sizeof(Area) + 2 * (capacity.staging + capacity.results);
  }
  void ring_doorbell();

  unsigned char* const memory_;
  const int num_processes_, self_;
  const Capacity capacity_;
};

}  // namespace jax_ring::shm
