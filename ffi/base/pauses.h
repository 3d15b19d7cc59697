// pauses.h: times when this process could not run, which no deadline counts.
#pragma once

#include <algorithm>
#include <deque>

#include "base/threads.h"

namespace jax_ring {

// The steady clock goes on while a process is stopped, frozen or without a core. A thread that looks at intervals then
// comes late, and the delay is a pause. Whoever asks for a running time looks as well, because after a pause threads
// resume in any order. One per process, except in tests.
class Pauses {
 public:
  using Time = SteadyClock::time_point;
  using Duration = SteadyClock::duration;

  static Pauses& instance() {
    return immortal([] { return new Pauses; });
  }

  // Call it again and again: the next time within the interval, if the process can run.
  void look(Time now, Duration interval) {
    const std::lock_guard<Mutex> lock(mutex_);
    note(now);
    interval_ = interval;
  }

  // The time that the process has run since then.
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
  // A pause begins when the next look was due. Small delays are usual on a busy machine: only a look later than this
  // many intervals ends a pause.
  static constexpr int kLate = 2;
  // Each pause also takes an interval of running, so a deadline of n intervals needs only the latest n pauses.
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
