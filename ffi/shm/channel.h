// channel.h: the memory that the processes of a group share: what each has staged, its results, and how far it is.
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

// A view of the memory for one of its processes. Zeroed memory is a channel in which nothing has happened yet.
//
// Two sets of staging and of results take turns. That is safe as long as a process
//   - stages a round when it is through with the last but one, and everybody has staged the last one, or has handed out
//     the results of the last but one;
//   - writes results when everybody has staged the round, and stages a call's first round when it is through with the
//     call before.
class Channel {
 public:
  static size_t bytes(int num_processes, const Capacity& capacity);

  Channel(unsigned char* memory, int num_processes, int self, const Capacity& capacity);

  unsigned char* staging(int process, uint32_t round) const { return set(process, round); }
  unsigned char* results(int process, uint32_t round) const { return set(process, round) + capacity_.staging; }

  // Tells the others that this process has staged a round, of which call. It may stage the same round again, for
  // another call, as long as not everybody has staged that round for the same call.
  void signal_staged(uint32_t round, uint64_t call);
  bool has_staged(int process, uint32_t round, uint64_t call) const;
  // The call for which a process has staged the round, if it has.
  std::optional<uint64_t> staged_call(int process, uint32_t round) const;

  void signal_results(uint32_t round);
  bool has_results(int process, uint32_t round) const;
  // Instead, of a round that has none: a count that stood still would seem to be ahead once the others have gone half
  // way round.
  void skip_results(uint32_t round);

  // What this process says of itself when others wait for it: cut to what there is room for.
  void post_status(const std::string& text);
  std::string status_of(int process) const;

  // Ends the group for everybody.
  void abort();
  bool has_aborted(int process) const;

  // Notes who this process is; whether `process` has; and whether it is known to have ended.
  void join();
  bool has_joined(int process) const;
  bool has_exited(int process) const;

  // Changes whenever a process announces something; and sleeping until it does.
  uint32_t doorbell(int process) const;
  void wait_doorbell(int process, uint32_t seen, std::chrono::nanoseconds timeout) const;

 private:
  // Written by its process alone. Everything that is polled lies in one line.
  struct alignas(128) Signals {
    std::atomic<uint32_t> doorbell, staged, results, aborted;
    std::atomic<uint64_t> calls[2];  // of the rounds of even and of odd number
  };
  // Written by those who wait for the process.
  struct alignas(128) Waiters {
    std::atomic<uint32_t> count;
  };
  struct alignas(128) Status {
    std::atomic<int64_t> pid, pid_namespace, start_time;
    std::atomic<uint32_t> length;
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
