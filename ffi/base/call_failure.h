// call_failure.h: why calls failed, and this process's failures by number.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ring {

// Error codes for the runtime, with the values that XLA gives them.
enum class ErrorCode : int {
  invalid_argument = 3,
  deadline_exceeded = 4,
  resource_exhausted = 8,
  failed_precondition = 9,
  internal = 13,
};

// Why a call failed. Processes tell each other everything but the number and, unless they leave, the cause.
struct CallFailure {
  enum class Kind {
    deadline,   // ranks did not arrive in time
    mismatch,   // a process or rank makes a different call
    absent,     // a process has made no call in the group yet
    stopped,    // a process is stopped, or busy with other work
    left,       // a process announced its departure: it raised an exception, or exited
    ended,      // a process ended without announcing it
    aborted,    // a process has aborted the group
    resources,  // memory, files or threads are short
    released,   // the program or its groups were released meanwhile
    overlap,    // two calls ran at the same time, but must not
    other,
    count
  };
  static constexpr int64_t kNone = -1;

  ErrorCode code = ErrorCode::deadline_exceeded;
  Kind kind = Kind::deadline;
  int64_t process = kNone;  // the other process at fault, if any
  int64_t rank = kNone;     // the rank at fault, in the call's group; the first one if several are
  // What that process did, e.g. "process 2 (rank 1) has ended"; empty if none is at fault. If a process leaves through
  // its own fault: a predicate, "raised ValueError: bad batch".
  std::string cause = {};
  std::string text = {};  // the error message
  int64_t number = 0;     // in this process, from 1

  // A failure without another process at fault.
  static CallFailure of(Kind kind, std::string text, ErrorCode code = ErrorCode::deadline_exceeded) {
    return {code, kind, kNone, kNone, {}, std::move(text)};
  }
  // The notice of a process that leaves through its own fault. how: a predicate.
  static CallFailure departure(std::string how) {
    return {ErrorCode::deadline_exceeded, Kind::left, kNone, kNone, std::move(how)};
  }

  // The error that the runtime raises. jax_ring itself reads back only the number.
  std::string message() const { return text + " [failure " + std::to_string(number) + "]"; }
};

using CallFailurePtr = std::shared_ptr<const CallFailure>;

// Thrown where a call cannot go on.
class CallError : public std::runtime_error {
 public:
  explicit CallError(CallFailure failure) : std::runtime_error(failure.text), failure(std::move(failure)) {}
  const CallFailure failure;
};

// This process's latest failures.
class CallFailures {
 public:
  // The name of the capsule that brings them to another module. One of another name is refused.
  static constexpr const char* kCapsule = "jax_ring.CallFailures";

  static CallFailures& instance() { return *current().load(); }
  // For a Python module with its own copy of this code: use another module's failures, so that no number comes twice.
  static void share(CallFailures* all) { current().store(all); }

  // Gives a failure its number.
  CallFailurePtr add(CallFailure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure.number = ++last_;
    kept_.push_back(std::make_shared<const CallFailure>(std::move(failure)));
    if (kept_.size() > kMost) kept_.pop_front();
    return kept_.back();
  }

  // Null if it is no longer kept.
  CallFailurePtr find(int64_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t dropped = last_ - static_cast<int64_t>(kept_.size());
    return number > dropped && number <= last_ ? kept_[number - dropped - 1] : nullptr;
  }

 private:
  static constexpr size_t kMost = 256;

  // Never destroyed: threads may outlive main.
  static std::atomic<CallFailures*>& current() {
    static std::atomic<CallFailures*> current{new CallFailures};
    return current;
  }

  mutable std::mutex mutex_;
  int64_t last_ = 0;
  std::deque<CallFailurePtr> kept_;
};

inline CallFailurePtr numbered(CallFailure failure) { return CallFailures::instance().add(std::move(failure)); }

}  // namespace jax_ring
