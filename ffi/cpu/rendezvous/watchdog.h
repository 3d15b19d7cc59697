// watchdog.h: fails every rendezvous that is not complete by its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"

namespace jax_ring::cpu {

class RendezvousMap;

// One per process. Its thread starts with the first RendezvousMap and checks a few times per deadline, so that a call
// needs no timer. Once one call of an execution has failed, all its calls fail at once with the same error, since the
// ranks that got it make no further calls of the execution.
class Watchdog {
 public:
  static Watchdog& instance();

  // Throws std::runtime_error if the thread cannot be started; the map is not watched then.
  void watch(RendezvousMap* rendezvous_map);
  void unwatch(RendezvousMap* rendezvous_map);

  // Seconds that a call waits for its ranks; must be positive and finite.
  void set_deadline(double seconds);
  double deadline() const { return deadline_seconds_.load(std::memory_order_relaxed); }

  // From now on errors of missing ranks name what to do where the runtime's launches hold the threads that these need.
  void say_that_launches_hold_threads() { launches_hold_threads_.store(true, std::memory_order_relaxed); }

  // Records that an execution has failed; its further calls fail at once.
  void record_failure(int64_t run_id, const CallFailurePtr& why);

  // Fails all open rendezvous, and forgets all failures: the runtime numbers executions anew once its backends have
  // been cleared.
  void abandon(const std::string& why);

  // Why this execution has failed; null if it has not.
  CallFailurePtr failure(int64_t run_id) const;

 private:
  Watchdog() = default;
  void run();
  void check_deadlines();
  void release_barriers(std::chrono::duration<double> limit);  // requires watched_mutex_
  CallFailurePtr failure_locked(int64_t run_id) const;

  std::atomic<double> deadline_seconds_{60.0};
  std::atomic<bool> launches_hold_threads_{false};

  std::mutex watched_mutex_;  // held during checks, so that no map is destroyed meanwhile
  std::vector<RendezvousMap*> watched_;
  bool started_ = false;
  std::condition_variable wake_;

  std::atomic<bool> any_failure_{false};
  mutable std::mutex failures_mutex_;
  std::deque<std::pair<int64_t, CallFailurePtr>> failures_;  // the latest kMaxFailures runs
};

}  // namespace jax_ring::cpu
