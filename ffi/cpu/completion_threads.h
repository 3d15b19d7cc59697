// completion_threads.h: tells the ranks of a rendezvous that it has ended, on threads that can afford what follows.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <string>

#include "cpu/rendezvous.h"

namespace jax_ring::cpu {

// Telling a rank runs the rest of its program, up to its next wait, before it returns. That may take long, and it may
// block: one of XLA's own collectives blocks until all ranks are there, also those that have not been told yet. So
//
//   - nobody tells from within a handler or while holding a lock: meetings are handed to this relay's threads;
//   - one thread tells the ranks of a meeting in turn, which is fastest where little follows (a loop of small
//     collectives then runs on this thread alone, without any switch between threads);
//   - if a telling has not returned after kPatience, each of the ranks that are left gets a thread of its own, as XLA
//     gives each device one.
//
// One for the process. Its threads are its own, since those of XLA's pool must not be blocked; there are as many as
// were ever needed at once.
class CompletionThreads {
 public:
  static constexpr std::chrono::microseconds kStragglerDelay{100};

  static CompletionThreads& instance();

  // Completes all participants of the meeting that have not been told yet, with the error if there is one. Returns
  // without waiting for any of them.
  void complete(RendezvousPtr rendezvous, std::optional<std::string> error = std::nullopt);

 private:
  struct Pending {
    RendezvousPtr rendezvous;
    std::optional<std::string> error;
    int next = 0;                  // the next rank
    int num_threads = 0;           // threads that are telling its ranks
    bool fan_out = false;          // it takes too long: any thread may take the next rank
    Clock::time_point last_start;  // when the latest telling began

    bool all_started() const { return next == rendezvous->num_ranks(); }
  };

  CompletionThreads() = default;
  void work();
  void watch_stragglers();
  void run_completions(Pending& pending, std::unique_lock<std::mutex>& lock);
  void wake_worker();

  std::mutex mutex_;            // guards all below; never held while a rank is told
  std::list<Pending> pending_;  // those that have not ended
  std::list<Pending> free_;     // ended ones, whose nodes the next tellings take
  int idle_workers_ = 0;
  int woken_workers_ = 0;  // idle ones that have been woken and are not running yet
  std::condition_variable work_available_;
  bool watcher_started_ = false;
  bool watcher_asleep_ = false;
  Clock::time_point last_use_;
  std::condition_variable watcher_wake_;
};

}  // namespace jax_ring::cpu
