// departures.h: the processes that have left the program, for calls that wait for a process without common memory yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/call_failure.h"

namespace jax_ring::shm {

// Connected groups learn of a process's end through their shared memory. For other groups someone has to look: a Python
// thread, in the program's key-value store. It looks only while a call waits.
class Departures {
 public:
  static Departures& instance();

  // A process's announcement when it left; nullopt if it is not known to have left.
  std::optional<CallFailure> of(int64_t process) const;

  // Asks for news of an awaited process.
  void ask(int64_t process);

  // The processes asked for since the last time. Waits up to `seconds` for one.
  std::vector<int64_t> await_questions(double seconds);
  // Ends these waits, now and in future.
  void end_questions();
  void note(int64_t process, const CallFailure& how);

  // Forgets everything: a new runtime has other processes.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::condition_variable asked_;
  bool ended_ = false;
  std::set<int64_t> questions_;
  std::map<int64_t, CallFailure> left_;
};

}  // namespace jax_ring::shm
