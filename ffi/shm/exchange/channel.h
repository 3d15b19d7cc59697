// channel.h: a group of processes' shared memory: staged values, results, and the signals between them.
//
// The first segment holds the signals, and has little room for values: there may be hundreds of groups. A group with
// larger calls gets a larger segment for the values, in a round of growth. Such a round has no values; the leader
// announces it:
//   - the leader creates the segment, and offers it before it signals the round;
//   - the others map it, and say whether they could before they signal the round;
//   - when all have signaled it, all know whether all have the segment, and use it from the next round on. If one could
//     not map it, for example for lack of file descriptors, all go on with their present one.
// A process unmaps the smaller segment by itself: the others have their own mappings.
//
// An idle group gives its larger segment back. The leader goes back to the first segment and announces it, and the
// others follow when they see that. The leader's next call begins with a round of growth that says which segment is in
// use: values staged in another segment are void.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/call_failure.h"
#include "shm/exchange/rounds.h"
#include "shm/memory/futex.h"
#include "shm/memory/segments.h"

namespace jax_ring::shm {

// Rounds are counted from 1, over all calls; the count may wrap around.
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
  // Of the first segment.
  static size_t bytes(int num_processes, const Capacities& capacities);

  // memory: the first segment, which must outlive the channel. capacities: of the first segment, then of larger ones.
  // segments: the source of larger segments and of messages from processes that have not joined; null if there is
  // neither.
  Channel(unsigned char* memory, int num_processes, int self, const Capacities& capacities,
          Segments* segments = nullptr);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // tiny: of a tiny round.
  unsigned char* staging(int process, uint32_t round, bool tiny) const {
    return tiny ? area(process).signals.tiny[round % 2] : set(process, round);
  }
  unsigned char* results(int process, uint32_t round) const { return set(process, round) + capacity().staging; }

  // The room at each level, and at the level in use. The same in all processes in each round.
  const Capacity& capacity(int level) const { return capacities_[level]; }
  const Capacity& capacity() const { return capacities_[level_]; }
  int level() const { return level_; }
  int max_level() const { return static_cast<int>(capacities_.size()) - 1; }

  // For the leader: whether larger segments than the one in use exist.
  bool may_grow() const { return segments_ != nullptr && level_ < max_level(); }
  // For the leader: whether the next call must begin with a round of growth, if only to name the segment in use.
  bool must_offer() const { return has_retired_; }
  // For the leader: creates a segment of this level, or of a lower one above the level in use, and offers it. Returns
  // whether there is something to offer: if must_offer(), at least the first segment. After a refusal it skips some
  // calls.
  bool offer_growth(int level);
  // For the others: maps the leader's offered segment.
  void accept_growth();
  // Between calls, after a long pause: gives the larger segment back. The others do so after the leader.
  void release_idle();
  // When all have signaled the round of growth: uses the segment if all have it.
  void finish_growth();

  // Publishes that this process has staged a round, for which call, and whether it is a round of growth. The process
  // may stage the same round again for another call until every process has staged it for the same call.
  // call: below 2^63.
  void signal_staged(uint32_t round, uint64_t call, bool growth = false);
  bool has_staged(int process, uint32_t round, uint64_t call, bool growth = false) const;
  // The call for which a process has staged the round, if it has.
  std::optional<uint64_t> staged_call(int process, uint32_t round) const;

  // When this process made the call that it stages, as in arrivals.h. Post it before signal_staged(). After a process
  // has staged the round, its time stays readable until this one stages the next but one.
  void post_arrival(uint32_t round, uint64_t arrival);
  uint64_t arrival_of(int process, uint32_t round) const;

  void signal_results(uint32_t round);
  bool has_results(int process, uint32_t round) const;
  // For rounds without results, at the latest before the next round is staged. Otherwise the count would fall 2^31
  // rounds behind the others, and then compare as ahead of them. The round may have had results.
  void skip_results(uint32_t round);

  // The text that other processes report while they wait for this one, truncated to fit.
  void post_status(const std::string& text);
  // That text, escaped, and, for a process that has aborted the group, the reason: everything but number and cause.
  CallFailure status_of(int process) const;

  // Aborts the group for all processes, and removes the name of any segment on offer. leaves: this process makes no
  // more calls at all; its status is the cause.
  void abort(const CallFailure& why = {}, bool leaves = false);
  bool has_aborted(int process) const;
  // Whether another process that has joined has aborted the group. Reads a line of this process's own.
  bool has_notice_of_abort() const { return area(self_).notices.of_abort.load(std::memory_order_acquire) != 0; }
  bool has_left(int process) const;

  // Publishes this process's identity; whether `process` has done so; and whether it is known to have exited.
  void join();
  bool has_joined(int process) const;
  bool has_exited(int process) const;
  // How many cores the processes that have joined may use together.
  int num_cores() const;
  // Its id in this process's pid namespace; 0 if it has not joined, or is in another namespace.
  int64_t pid_of(int process) const;

  // A count that changes with every signal of `process`, and a wait for its change.
  uint32_t doorbell(int process) const;
  void wait_doorbell(int process, uint32_t seen, std::chrono::nanoseconds timeout) const;

 private:
  // Written only by the process that owns the area. All polled words are in one line.
  struct alignas(128) Signals {
    Atomic<uint32_t> doorbell, staged, results, aborted;
    Atomic<uint64_t> calls[2];                     // of the latest even and odd round
    std::atomic<uint64_t> arrivals[2];             // likewise; published by `staged`
    alignas(8) unsigned char tiny[2][kTinyBytes];  // likewise: staged data of a tiny round
  };
  // Written by the other processes.
  struct alignas(128) Notices {
    Atomic<uint32_t> waiters;   // number of processes that sleep until the owner signals
    Atomic<uint32_t> of_abort;  // whether a process has aborted the group
  };
  struct alignas(128) Growth {
    Atomic<uint32_t> offered;  // by the leader: the segment's number and level
    Atomic<uint32_t> mapped;   // the same, by each process that has mapped it; or kRefused
    Atomic<uint32_t> retired;  // the same, by the leader once it stops using it
  };
  struct alignas(128) Status {
    Atomic<int64_t> pid, pid_namespace, start_time;
    std::atomic<uint64_t> cores[16];                 // a bit for each that the process may use; published by `pid`
    std::atomic<int64_t> code, kind, process, rank;  // of a CallFailure; published by `aborted`
    Atomic<uint32_t> length;
    char text[1024];
  };
  struct Area {
    Signals signals;
    Notices notices;
    Growth growth;
    Status status;
  };

  static constexpr uint32_t kRefused = 0;
  static constexpr uint32_t kLevels = 8;  // more than exist

  Area& area(int process) const { return reinterpret_cast<Area*>(memory_)[process]; }
  unsigned char* set(int process, uint32_t round) const {
    return values_ + process * bytes_of_values(capacity()) + round % 2 * (capacity().staging + capacity().results);
  }
  static size_t bytes_of_values(const Capacity& capacity) { return 2 * (capacity.staging + capacity.results); }
  void offer(int level);
  void unlink_offer();
  void skip_calls();
  void use_first_segment();
  std::optional<uint64_t> staged_word(int process, uint32_t round) const;
  void ring_doorbell();

  unsigned char* const memory_;
  const int num_processes_, self_;
  const Capacities capacities_;
  Segments* const segments_;

  // Segments that this process uses, or has mapped for use.
  int level_ = 0;
  unsigned char* values_;
  Memory grown_, accepted_;
  uint32_t in_use_ = 0;          // the offer that brought it
  uint32_t offer_ = 0;           // the last one that this process has made, or tried to map
  bool has_retired_ = false;     // for the leader: since its last call
  uint32_t last_offer_ = 0;      // for the leader: the number of its last segment
  uint32_t calls_to_skip_ = 0;   // for the leader: calls that do not ask for a larger segment
  uint32_t skip_next_time_ = 1;  // the same after the next refusal
};

}  // namespace jax_ring::shm
