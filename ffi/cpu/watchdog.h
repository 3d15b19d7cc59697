// watchdog.h: ends every rendezvous that is not complete by its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jax_ring::cpu {

class RendezvousMap;

// One for the process. Its thread starts with the first rendezvous and looks around a few times per deadline, so that
// a call pays for no timer. Once one call of an execution has failed, all its calls fail, at once and with the same
// words: the ranks that got the error will not make the execution's further calls.
class Watchdog {
 public:
  static Watchdog& instance();

  void watch(RendezvousMap* rendezvous_map);
  void unwatch(RendezvousMap* rendezvous_map);

  // Seconds that a call waits for its ranks; must be positive and finite.
  void set_deadline(double seconds);
  double deadline() const { return deadline_seconds_.load(std::memory_order_relaxed); }

  // Notes that an execution has failed: its further calls fail as well, at once.
  void record_failure(int64_t run_id, const std::string& why);

  // Why this execution has failed, if it has.
  std::optional<std::string> failure(int64_t run_id) const;

 private:
  Watchdog() = default;
  void run();
  void check_deadlines();
  const std::string* failure_locked(int64_t run_id) const;

  std::atomic<double> deadline_seconds_{60.0};

  std::mutex watched_mutex_;  // held while rendezvous are looked at, so that none is destroyed meanwhile
  std::vector<RendezvousMap*> watched_;
  bool started_ = false;
  std::condition_variable wake_;

  std::atomic<bool> any_failure_{false};
  mutable std::mutex failures_mutex_;
  std::deque<std::pair<int64_t, std::string>> failures_;  // the latest kFailuresKept runs
};

}  // namespace jax_ring::cpu
