// watchdog.h: fails every rendezvous that misses its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "cpu/rendezvous/rendezvous.h"

namespace jax_ring::cpu {

// Keeps the program from launching executions, and from reacting to their errors.
class LaunchLock {
 public:
  virtual ~LaunchLock() = default;
  // Returns false if the lock is not available soon.
  virtual bool acquire() = 0;
  virtual void release() = 0;
};

// One per process. Its thread starts with the first RendezvousMap and checks a few times per deadline, so a call needs
// no timer. Once one call of an execution has failed, all its calls fail at once with the same error: ranks that got
// the error make no further calls of the execution.
class Watchdog {
 public:
  static Watchdog& instance();

  // Throws std::runtime_error if the thread cannot start; then nobody watches the map.
  void watch(RendezvousMap* rendezvous_map);
  void unwatch(RendezvousMap* rendezvous_map);

  // Seconds that a call waits for its ranks; must be positive and finite.
  void set_deadline(double seconds);
  double deadline() const { return deadline_seconds_.load(std::memory_order_relaxed); }

  // From now on errors about missing ranks suggest a remedy if the runtime's launches hold the threads that these need.
  void say_that_launches_hold_threads() { launches_hold_threads_.store(true, std::memory_order_relaxed); }

  // Keeps the program from launching while calls fail at their deadline. Executions of the same program that arrive
  // meanwhile were in flight before anyone could know of the failure. They fail too: each would otherwise wait for a
  // deadline of its own. A later one may be a new attempt, and other programs may be healthy.
  void set_launch_lock(std::unique_ptr<LaunchLock> lock);

  // Records that an execution has failed. Its further calls fail at once.
  void record_failure(int64_t run_id, const CallFailurePtr& why);

  // Fails all open rendezvous and forgets all failures: the runtime restarts its numbering of executions once its
  // backends are cleared.
  void abandon(const std::string& why);

  // The failure of this execution; null if there is none.
  CallFailurePtr failure(int64_t run_id) const;
  // The failure of an execution in which a rank makes this map's call; null if there is none.
  CallFailurePtr failure(int64_t run_id, RendezvousMap* rendezvous_map);

 private:
  Watchdog() = default;
  void run();
  void check_deadlines();
  LaunchLock* lock_of_expired();  // null if no call has expired
  void fail_expired(bool with_those_in_flight);
  void fail_later_executions(const std::vector<RendezvousPtr>& failed, CallFailure why);
  void await_those_in_flight();
  void release_barriers(std::chrono::duration<double> limit);  // requires watched_mutex_
  CallFailurePtr failure_locked(int64_t run_id) const;
  void record_failure_locked(int64_t run_id, const CallFailurePtr& why);

  std::atomic<double> deadline_seconds_{60.0};
  std::atomic<bool> launches_hold_threads_{false};

  std::mutex watched_mutex_;  // held during checks, so that no map is destroyed meanwhile
  std::vector<RendezvousMap*> watched_;
  bool started_ = false;
  std::condition_variable wake_;
  std::unique_ptr<LaunchLock> launch_lock_;

  std::atomic<bool> any_failure_{false};
  mutable std::mutex failures_mutex_;
  std::deque<std::pair<int64_t, CallFailurePtr>> failures_;  // the latest kMaxFailures runs
  std::set<RendezvousMap*> failing_;                         // calls of programs with all executions in flight failing
  CallFailurePtr failure_in_flight_;
  int64_t num_failed_in_flight_ = 0;
};

}  // namespace jax_ring::cpu
