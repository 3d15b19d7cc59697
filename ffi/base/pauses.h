// pauses.h: when this process could not run, which no deadline counts.
#pragma once

#include <algorithm>
#include <deque>

#include "base/threads.h"

namespace jax_ring {

// The steady clock goes on while a process is stopped or frozen, and while it gets no core. A thread that looks at
// intervals then comes late, and what it is late by is a pause. Whoever asks how long something has run looks as well:
// after a pause, no thread need come before another. One per process, except for tests.
class Pauses {
 public:
  using Time = SteadyClock::time_point;
  using Duration = SteadyClock::duration;

  static Pauses& instance() {
    return immortal([] { return new Pauses; });
  }

  // Called again and again; the next time within the interval, if the process can run.
  void look(Time now, Duration interval) {
    const std::lock_guard<Mutex> lock(mutex_);
    note(now);
    interval_ = interval;
  }

  // How long the process has run since then.
  Duration run_since(Time begin, Time now = SteadyClock::now()) {
    const std::lock_guard<Mutex> lock(mutex_);
    note(now);
    Duration run = now - begin;
    for (const Pause& pause : pauses_) {
      run -= std::max(std::min(pause.end, now) - std::max(pause.begin, begin), Duration(0));
    }
    return run;
  }

 private:
  struct Pause {
    Time begin, end;
  };
  // As if it had stopped where the next look was due. A little late is usual, on a machine with much to do.
  static constexpr int kLate = 2;
  // Each takes an interval of running, too, so that the latest are enough for a deadline of as many intervals.
  static constexpr size_t kMost = 1024;

  // Requires mutex_.
  void note(Time now) {
    const Time due = last_look_ + interval_;
    if (interval_ > Duration(0) && now > last_look_ + kLate * interval_) {
      pauses_.push_back({due, now});
      if (pauses_.size() > kMost) pauses_.pop_front();
    }
    last_look_ = std::max(last_look_, now);
  }

  Mutex mutex_;
  Time last_look_;
  Duration interval_{0};  // 0 before the first look
  std::deque<Pause> pauses_;
};

}  // namespace jax_ring
