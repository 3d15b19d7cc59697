// completion_threads.h: runs a rendezvous's completions on threads that may block.
#pragma once

#include <chrono>
#include <list>

#include "base/call_failure.h"
#include "base/threads.h"
#include "cpu/rendezvous/rendezvous.h"

namespace jax_ring::cpu {

// A completion runs the rank's program up to its next wait. This may take long, and it may block: XLA's own collectives
// block until all ranks have arrived, including ranks with completions that have not run yet. So
//
//   - completions never run inside a handler or under a lock, but are queued for the threads of this class;
//   - one thread runs a rendezvous's completions in turn. This is fastest when little work follows: a loop of small
//     collectives then runs on this thread alone, without a context switch;
//   - if a completion takes longer than kStragglerDelay, each remaining rank gets a thread of its own, as in XLA, with
//     one thread per device.
//
// One instance per process. It has threads of its own, because threads of XLA's pool must not block. Their number is
// the most that were ever needed at once.
class CompletionThreads {
 public:
  static constexpr std::chrono::microseconds kStragglerDelay{100};

  static CompletionThreads& instance();

  // Whether the calling thread may wait for a moment: no completion waits for it.
  static bool may_wait();

  // Starts the first threads, once. Call it before any call can need them: a call whose threads cannot start would
  // never complete. Throws std::runtime_error if they cannot.
  void start();

  // Releases the ranks that wait in their calls, unless there is an error, and queues the others' completions. Returns
  // without waiting for these. Throws like start().
  void complete(RendezvousPtr rendezvous, CallFailurePtr error = nullptr);

 private:
  struct Pending {
    RendezvousPtr rendezvous;
    CallFailurePtr error;
    int next = 0;             // rank whose completion runs next
    int num_threads = 0;      // threads that are running completions of this rendezvous
    bool is_watched = false;  // whether some completions may wait for a slow one
    bool fan_out = false;     // a completion is slow: any thread may take the next rank
    int missing_threads = 0;  // still needed by fan_out
    int next_at_look = -1;    // `next` when the watcher looked last

    bool all_started() const { return next == rendezvous->num_ranks(); }
    // Skips ranks without a completion: they are in other processes.
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
  bool used_ = false;  // by a watched rendezvous, since the watcher looked last
  ConditionVariable watcher_wake_;
};

}  // namespace jax_ring::cpu
