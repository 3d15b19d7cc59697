// failure_notes.h: tells a group's other processes that one could not map the memory through which it would report.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/call_failure.h"
#include "shm/memory/names.h"

namespace jax_ring::shm {

// What failed, and why.
struct MappingFailure {
  enum Step { creating, opening, mapping };
  int error = 0;  // errno
  Step step = creating;
  size_t bytes = 0;  // of the segment
  size_t files = 0;  // how many the process may have open; only if no more are left

  // error: errno of the failed system call.
  static MappingFailure of(Step step, size_t bytes, int error);

  // The text continues a sentence that names the process.
  CallFailure failure() const;
};

// A note to one process is a symbolic link with a short target beside the segment. It takes no space of the file
// system, because the kernel keeps a short target with the link, and no file descriptor. Neither may be left.
class FailureNotes {
 public:
  FailureNotes(Names names, int num_processes, int self);
  ~FailureNotes() { remove(); }
  FailureNotes(const FailureNotes&) = delete;
  FailureNotes& operator=(const FailureNotes&) = delete;

  // Writes to all other processes. Does nothing where it cannot.
  void write(const MappingFailure& failure);
  // Whether all have read this process's notes.
  bool are_read() const;
  // Removes unread notes.
  void remove();
  // Another process's note to this one, which it removes; nullopt if there is none.
  std::optional<MappingFailure> take(int process);

 private:
  std::string path(int from, int to) const;

  const Names names_;
  const int num_processes_, self_;
  bool has_written_ = false;
};

}  // namespace jax_ring::shm
