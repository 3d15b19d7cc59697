// call_counts.h: tells the equal calls of a program apart, in all of its processes alike.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace jax_ring::shm {

// Equal calls of a program are told apart by the order in which the compiler builds them, which is the same in all
// processes. A process may compile a program more often than the others do, so that this is to be counted anew each
// time; and several threads may compile at once, so that each counts for itself: a program is built by one thread,
// the one that compiles it.
class CallCounts {
 public:
  static CallCounts& of_this_thread() {
    thread_local CallCounts counts;
    return counts;
  }

  // A program of this name is about to be compiled.
  void begin(const std::string& program) { counts_.erase(program); }

  // How many calls like it the program has had before.
  int64_t next(const std::string& program, uint64_t call) { return counts_[program][call]++; }

 private:
  std::map<std::string, std::map<uint64_t, int64_t>> counts_;
};

}  // namespace jax_ring::shm
