// support.h: shared by the native tests: data, timed waits.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "base/threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "cpu/rendezvous/watchdog.h"
#include "tests/support/elements.h"

namespace jax_ring::cpu::testing {

// No test waits longer than this: a hang is a failure, not a stalled build.
constexpr std::chrono::seconds kTestTimeout{20};

// Sanitizers slow loops down about tenfold; loops that only add certainty are shorter under them.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSlowdown = 10;
#else
constexpr int kSlowdown = 1;
#endif

// As a container or a scheduler does.
inline void bind_to_core(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  ASSERT_EQ(sched_setaffinity(0, sizeof(only), &only), 0);
}

// ---- Calls and waits ----------------------------------------------------------------------------------------------

// A run id that no other test of the process has used: the watchdog remembers failed ones.
inline int64_t next_run_id() {
  static std::atomic<int64_t> next{1};
  return next.fetch_add(1);
}

inline CallFailurePtr failure_with(std::string text) {
  return numbered(CallFailure::of(CallFailure::Kind::other, std::move(text)));
}

// The arguments of one participant's completion. The completion keeps the state alive, so a late second call is
// harmless, but counted.
class Outcome {
 public:
  Outcome() = default;
  Outcome(Outcome&&) = default;

  std::function<void(const CallFailure* failure)> completion() const {
    return [state = state_](const CallFailure* failure) {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (state->times++ == 0 && failure != nullptr) state->failure = *failure;
      state->changed.notify_all();
    };
  }

  // Whether the completion runs in time.
  bool wait(std::chrono::duration<double> timeout = kTestTimeout) const {
    std::unique_lock<std::mutex> lock(state_->mutex);
    return state_->changed.wait_for(lock, timeout, [&] { return state_->times > 0; });
  }

  int times() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->times;
  }

  // Empty if the call succeeded.
  std::string error() const { return failure().text; }
  CallFailure failure() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->failure;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int times = 0;
    CallFailure failure;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Sets the deadline for a scope.
class ScopedDeadline {
 public:
  explicit ScopedDeadline(double seconds) : before_(Watchdog::instance().deadline()) {
    Watchdog::instance().set_deadline(seconds);
  }
  ~ScopedDeadline() { Watchdog::instance().set_deadline(before_); }
  ScopedDeadline(const ScopedDeadline&) = delete;
  ScopedDeadline& operator=(const ScopedDeadline&) = delete;

 private:
  double before_;
};

// Makes the next thread starts fail, as at a limit of the system.
class FailingThreadStarts {
 public:
  explicit FailingThreadStarts(int count) { failing_thread_starts = count; }
  ~FailingThreadStarts() { failing_thread_starts = 0; }
  FailingThreadStarts(const FailingThreadStarts&) = delete;
  FailingThreadStarts& operator=(const FailingThreadStarts&) = delete;
};

}  // namespace jax_ring::cpu::testing
