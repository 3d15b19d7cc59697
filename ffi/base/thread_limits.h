// thread_limits.h: the limits that can keep a thread from starting, with their values, for an error message.
#pragma once

#include <sys/resource.h>

#include <fstream>
#include <sstream>
#include <string>

namespace jax_ring {

// The first line of a file, or "unknown".
inline std::string first_line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

inline std::string text_of_limit(int resource, rlim_t unit) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur / unit);
}

// One sentence with the limits, and one with advice.
inline std::string describe_thread_limits() {
  std::ostringstream text;
  text << "The limits here: processes and threads of this user (ulimit -u) " << text_of_limit(RLIMIT_NPROC, 1)
       << ", address space in KiB (ulimit -v) " << text_of_limit(RLIMIT_AS, 1024)
       << ", processes and threads of this container (pids.max) " << first_line_of("/sys/fs/cgroup/pids.max")
       << " with " << first_line_of("/sys/fs/cgroup/pids.current")
       << " in use. Raise the one that has been reached (docker run --pids-limit), or run fewer processes or threads.";
  return text.str();
}

}  // namespace jax_ring
