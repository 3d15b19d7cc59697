// locks.h: mutexes, condition variables and the clock of the model.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "model/checker/checker.h"
#include "model/checker/knowledge.h"

namespace jax_ring::model {

class Mutex {
 public:
  void lock();
  void unlock();

 private:
  friend class ConditionVariable;
  bool is_held_ = false;
  Baton baton_;
};

// Time passes only when a wait times out.
struct SteadyClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<SteadyClock>;
  static constexpr bool is_steady = true;
  static time_point now();
  // Waits until no thread can go on, then for this long. A timed wait may time out meanwhile.
  static void sleep(duration time);
};

// No wait returns spuriously. A timed one may time out at once, as often as the scenario allows, and whenever no thread
// can go on otherwise.
class ConditionVariable {
 public:
  template <class Ready>
  void wait(std::unique_lock<Mutex>& lock, Ready ready) {
    while (!ready()) wait(*lock.mutex());
  }
  template <class Duration>
  void wait_for(std::unique_lock<Mutex>& lock, Duration duration) {
    wait_for(*lock.mutex(), std::chrono::duration_cast<SteadyClock::duration>(duration));
  }
  void notify_one();
  void notify_all();

 private:
  void wait(Mutex& mutex);
  void wait_for(Mutex& mutex, SteadyClock::duration duration);
  void begin_wait(Mutex& mutex);
  bool is_waiting(int thread) const;

  std::vector<int> waiters_;
};

// How many waits of this execution may time out even though threads could go on.
void allow_early_timeouts(int count);

// A value of each thread.
template <class T>
class PerThread {
 public:
  operator T() const { return is_current() ? values_[this_thread()] : T{}; }
  PerThread& operator=(T value) {
    if (!is_current()) values_ = {};
    execution_ = execution();
    values_[this_thread()] = value;
    return *this;
  }

 private:
  bool is_current() const { return execution_ == execution(); }

  uint64_t execution_ = 0;
  std::array<T, kMaxThreads> values_{};
};

}  // namespace jax_ring::model
