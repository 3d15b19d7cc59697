// failure_notes.cc: writes and reads the notes.
#include "shm/peers/failure_notes.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <utility>

namespace jax_ring::shm {
namespace {

constexpr char kFolder[] = "/dev/shm";
constexpr size_t kLongestTarget = 127;  // Linux allocates a page for a longer one

bool is_shortage(int error) {
  return error == ENOSPC || error == EMFILE || error == ENFILE || error == ENOMEM || error == EDQUOT || error == EAGAIN;
}

const char* name_of(MappingFailure::Step step) {
  switch (step) {
    case MappingFailure::creating:
      return "create";
    case MappingFailure::opening:
      return "open";
    case MappingFailure::mapping:
      return "map";
  }
  return "";
}

void add_advice(const MappingFailure& failure, std::ostream& text) {
  struct statvfs system;
  switch (failure.error) {
    case ENOSPC:
      if (statvfs(kFolder, &system) != 0) return;
      text << " " << kFolder << " has " << (system.f_blocks * system.f_frsize >> 10) << " KiB, of which "
           << (system.f_bavail * system.f_frsize >> 10) << " KiB are free"
           << (system.f_files > 0 && system.f_favail == 0 ? ", and may have no more files" : "")
           << ". Remove files there, or make it larger: docker run --shm-size, or mount -o remount,size=.";
      break;
    case EMFILE:
      text << " It may have " << failure.files << " files open: raise that limit with ulimit -n, or close some.";
      break;
    case ENFILE:
      text << " All processes together may have as many open as /proc/sys/fs/file-max says.";
      break;
    case ENOMEM:
      text << " Memory is short, or the address space is limited (ulimit -v), or a process has more mappings than "
              "/proc/sys/vm/max_map_count allows.";
      break;
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOENT:
      text << " " << kFolder << " must be a folder in which this user can write.";
      break;
  }
}

size_t most_files() {
  struct rlimit limit;
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<size_t>(limit.rlim_cur) : 0;
}

}  // namespace

MappingFailure MappingFailure::of(Step step, size_t bytes, int error) {
  return {error, step, bytes, error == EMFILE ? most_files() : 0};
}

CallFailure MappingFailure::failure() const {
  std::ostringstream text;
  text << "could not " << name_of(step) << " " << ((bytes + 1023) >> 10) << " KiB of shared memory in " << kFolder
       << " for a group of processes: " << std::strerror(error) << ".";
  add_advice(*this, text);
  return CallFailure::of(CallFailure::Kind::resources, text.str(),
                         is_shortage(error) ? ErrorCode::resource_exhausted : ErrorCode::failed_precondition);
}

FailureNotes::FailureNotes(Names names, int num_processes, int self)
    : names_(std::move(names)), num_processes_(num_processes), self_(self) {}

void FailureNotes::remove() {
  if (!std::exchange(has_written_, false)) return;
  for (int process = 0; process < num_processes_; ++process) ::unlink(path(self_, process).c_str());
}

std::string FailureNotes::path(int from, int to) const { return kFolder + names_.note(from, to); }

void FailureNotes::write(const MappingFailure& failure) {
  has_written_ = true;
  char target[kLongestTarget + 1];
  std::snprintf(target, sizeof(target), "%d %d %zu %zu", failure.error, failure.step, failure.bytes, failure.files);
  for (int process = 0; process < num_processes_; ++process) {
    if (process == self_) continue;
    [[maybe_unused]] const int result = symlink(target, path(self_, process).c_str());
  }
}

bool FailureNotes::are_read() const {
  struct stat status;
  for (int process = 0; process < num_processes_; ++process) {
    if (process != self_ && lstat(path(self_, process).c_str(), &status) == 0) return false;
  }
  return true;
}

std::optional<MappingFailure> FailureNotes::take(int process) {
  const std::string from = path(process, self_);
  char target[kLongestTarget + 1];
  struct stat status;
  const ssize_t length = readlink(from.c_str(), target, kLongestTarget);
  if (length < 0 || lstat(from.c_str(), &status) != 0 || status.st_uid != geteuid()) return std::nullopt;
  target[length] = 0;
  MappingFailure failure;
  int step;
  if (std::sscanf(target, "%d %d %zu %zu", &failure.error, &step, &failure.bytes, &failure.files) != 4) {
    return std::nullopt;
  }
  if (step < MappingFailure::creating || step > MappingFailure::mapping) return std::nullopt;
  failure.step = static_cast<MappingFailure::Step>(step);
  ::unlink(from.c_str());
  return failure;
}

}  // namespace jax_ring::shm
