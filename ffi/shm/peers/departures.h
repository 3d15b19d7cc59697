// departures.h: which processes of the program have left it, for calls that wait for one that shares no memory with
// this process yet.
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

// The groups that a process has connected hear of its end through their shared memory. For the others someone has to
// look: a thread of Python, in the key-value store of the program. It looks only while a call waits.
class Departures {
 public:
  static Departures& instance();

  // What a process has told when it left; nullopt if it is not known to have left.
  std::optional<CallFailure> of(int64_t process) const;

  // Asks for news of a process that a call waits for.
  void ask(int64_t process);

  // The processes that have been asked for since the last time. Waits for up to `seconds` for there to be one.
  std::vector<int64_t> await_questions(double seconds);
  // Ends these waits, now and in future.
  void end_questions();
  void note(int64_t process, const CallFailure& how);

  // Forgets everything: the processes of another runtime are others.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::condition_variable asked_;
  bool ended_ = false;
  std::set<int64_t> questions_;
  std::map<int64_t, CallFailure> left_;
};

}  // namespace jax_ring::shm
