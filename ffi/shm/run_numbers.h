// run_numbers.h: numbers the executions of a program in all of its processes alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>

namespace jax_ring::shm {

// XLA numbers executions as well. But where it begins depends on the program's text, in which the places in the source
// from where it was called differ between processes; and it goes on from where a process was when others were started.
//
// A device runs programs in the order in which they were launched, and all processes of a group see those executions in
// which a call of the group is made. So the executions of a program can be numbered as they are seen by the group.
class RunNumbers {
 public:
  // The number of an execution that this process knows by run_id.
  uint64_t of(uint64_t program, int64_t run_id) {
    Runs& runs = programs_[program];
    const auto found = std::find(runs.recent.rbegin(), runs.recent.rend(), run_id);
    if (found != runs.recent.rend()) return runs.next - 1 - static_cast<uint64_t>(found - runs.recent.rbegin());
    runs.recent.push_back(run_id);
    if (runs.recent.size() > kRecent) runs.recent.pop_front();
    return runs.next++;
  }

 private:
  // More than the runtime has under way at a time.
  static constexpr size_t kRecent = 1024;

  struct Runs {
    std::deque<int64_t> recent;
    uint64_t next = 0;
  };
  std::map<uint64_t, Runs> programs_;
};

}  // namespace jax_ring::shm
