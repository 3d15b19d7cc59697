// locks.cc: a lock is an operation whose order matters; so are waits and notifications.
#include "model/checker/locks.h"

#include <algorithm>

namespace jax_ring::model {
namespace {

// Of one execution.
struct Time {
  uint64_t execution = 0;
  SteadyClock::duration now{};
  int early_timeouts = 0;
};

Time& time_now() {
  static Time time;
  if (time.execution != execution()) time = {execution(), {}, 0};
  return time;
}

}  // namespace

void Mutex::lock() {
  if (this_thread() < 0) return;
  ordered(
      this, "locks a mutex", [&] { return !is_held_; },
      [&] {
        is_held_ = true;
        baton_.take();
      });
}

void Mutex::unlock() {
  if (this_thread() < 0) return;
  baton_.give();
  is_held_ = false;
}

SteadyClock::time_point SteadyClock::now() { return time_point(time_now().now); }

void SteadyClock::sleep(duration time) {
  ordered(
      &time_now(), "sleeps", [] { return is_quiet(); },
      [&] {
        time_now().now += time;
        ++time_now().early_timeouts;
      });
}

void allow_early_timeouts(int count) { time_now().early_timeouts = count; }

bool ConditionVariable::is_waiting(int thread) const {
  return std::find(waiters_.begin(), waiters_.end(), thread) != waiters_.end();
}

// Unlocks and begins to wait, in one step.
void ConditionVariable::begin_wait(Mutex& mutex) {
  ordered(
      this, "begins to wait for a condition", [] { return true; },
      [&] {
        mutex.unlock();
        waiters_.push_back(this_thread());
      });
}

void ConditionVariable::wait(Mutex& mutex) {
  begin_wait(mutex);
  const int self = this_thread();
  block("waits for a condition", [&] { return !is_waiting(self); });
  mutex.lock();
}

void ConditionVariable::wait_for(Mutex& mutex, SteadyClock::duration duration) {
  begin_wait(mutex);
  const int self = this_thread();
  ordered(
      this, "waits for a condition, or a timeout",
      [&] { return !is_waiting(self) || is_quiet() || time_now().early_timeouts > 0; },
      [&] {
        if (!is_waiting(self)) return;
        if (time_now().early_timeouts > 0) --time_now().early_timeouts;
        waiters_.erase(std::find(waiters_.begin(), waiters_.end(), self));
        time_now().now += duration;
      });
  mutex.lock();
}

void ConditionVariable::notify_one() {
  ordered(
      this, "notifies a thread", [] { return true; },
      [&] {
        if (!waiters_.empty()) waiters_.erase(waiters_.begin() + choose(static_cast<int>(waiters_.size())));
      });
}

void ConditionVariable::notify_all() {
  ordered(this, "notifies all threads", [] { return true; }, [&] { waiters_.clear(); });
}

}  // namespace jax_ring::model
