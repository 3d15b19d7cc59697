// failure_notes.h: tells the other processes of a group that one could not map the memory with which it would tell
// them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/call_failure.h"

namespace jax_ring::shm {

// What failed, and why.
struct MappingFailure {
  enum Step { creating, opening, mapping };
  int error = 0;  // errno
  Step step = creating;
  size_t bytes = 0;  // of the segment
  size_t files = 0;  // that the process may have open; only if there are no more

  // error: the errno of the system call that has just failed.
  static MappingFailure of(Step step, size_t bytes, int error);

  // With a text that follows what names the process.
  CallFailure failure() const;
};

// A note to one process is a symbolic link with a short target beside the segment. It takes no space of the file
// system, whose kernel keeps such a target with the link, and no file descriptor: there may be none left of either.
class FailureNotes {
 public:
  // name: of the segment, for shm_open.
  FailureNotes(const std::string& name, int num_processes, int self);
  ~FailureNotes() { remove(); }
  FailureNotes(const FailureNotes&) = delete;
  FailureNotes& operator=(const FailureNotes&) = delete;

  // Writes to each of the others. Does nothing where it cannot.
  void write(const MappingFailure& failure);
  // Whether all have read what this process wrote.
  bool are_read() const;
  // Removes what nobody has read.
  void remove();
  // The note of another process to this one, which is removed with it; nullopt if there is none.
  std::optional<MappingFailure> take(int process);

 private:
  std::string path(int from, int to) const;

  const std::string name_;
  const int num_processes_, self_;
  bool has_written_ = false;
};

}  // namespace jax_ring::shm
