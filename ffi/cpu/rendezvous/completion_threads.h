// completion_threads.h: runs the completions of a rendezvous on threads that may block.
#pragma once

#include <chrono>
#include <list>

#include "base/call_failure.h"
#include "base/threads.h"
#include "cpu/rendezvous/rendezvous.h"

namespace jax_ring::cpu {

// A completion runs the rank's program up to its next wait before it returns. This may take long, and it may block: one
// of XLA's own collectives blocks until all ranks have arrived, including ranks whose completions have not run yet. So
//
//   - completions never run inside a handler or under a lock; they are queued for the threads of this class;
//   - one thread runs the completions of a rendezvous in turn. This is fastest when little work follows: a loop of
//     small collectives then runs on this thread alone, without a context switch;
//   - if a completion has not returned after kStragglerDelay, each remaining rank gets a thread of its own, as in XLA,
//     where each device has one.
//
// One instance per process. It has its own threads because those of XLA's pool must not block. Their number is the most
// that were ever needed at the same time.
class CompletionThreads {
 public:
  static constexpr std::chrono::microseconds kStragglerDelay{100};

  static CompletionThreads& instance();

  // Whether the thread that asks may wait for a moment: no completion waits for it.
  static bool may_wait();

  // Starts the first threads, unless they have been started. Called before there is a call that could need them: a call
  // whose threads cannot be started would never complete. Throws std::runtime_error if they cannot.
  void start();

  // Lets the ranks go on that wait in their calls, unless there is an error, and runs the completions of the others.
  // Returns without waiting for them. Throws as start() does.
  void complete(RendezvousPtr rendezvous, CallFailurePtr error = nullptr);

 private:
  struct Pending {
    RendezvousPtr rendezvous;
    CallFailurePtr error;
    int next = 0;                  // rank whose completion runs next
    int num_threads = 0;           // threads that are running completions of this rendezvous
    bool is_watched = false;       // whether its completions may wait for one that is slow
    bool fan_out = false;          // a completion is slow: any thread may take the next rank
    int missing_threads = 0;       // that fan_out still needs
    Clock::time_point last_start;  // when the latest completion started

    bool all_started() const { return next == rendezvous->num_ranks(); }
    // Passes over ranks without a completion, which are in other processes.
    void find_next() {
      while (!all_started() && !rendezvous->done[next]) ++next;
    }
  };

  CompletionThreads() = default;
  void start_locked();
  void work();
  void watch_stragglers();
  void run_completions(Pending& pending, std::unique_lock<Mutex>& lock);
  bool wake_worker();

  Mutex mutex_;                 // guards everything below; never held while a completion runs
  std::list<Pending> pending_;  // not finished yet, oldest first
  std::list<Pending> free_;     // finished; their list nodes are reused
  int idle_workers_ = 0;
  int woken_workers_ = 0;  // woken, but not running yet; included in idle_workers_
  ConditionVariable work_available_;
  bool worker_started_ = false;
  bool watcher_started_ = false;
  bool watcher_asleep_ = false;
  Clock::time_point last_use_;  // of what is watched
  ConditionVariable watcher_wake_;
};

}  // namespace jax_ring::cpu
