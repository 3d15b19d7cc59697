// shared_memory.cc: creates, opens and maps the segments.
#include "shm/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/pauses.h"

namespace jax_ring::shm {
namespace {

// The header before the first segment's usable memory, on a page of its own.
struct Header {
  std::atomic<uint32_t> num_mapped;
};
constexpr size_t kHeaderBytes = 4096;

constexpr std::chrono::milliseconds kPollInterval(1);
// Larger segments leave this part of the file system free: for the first segments of other groups, which cannot do
// without, and for other programs.
constexpr double kFreePart = 0.5;

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

// Memory, or the reason for its absence.
struct Mapped {
  Memory memory;
  MappingFailure failure;
};

Mapped map(const File& file, size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return {nullptr, MappingFailure::of(MappingFailure::mapping, bytes, errno)};
  return {Memory(static_cast<unsigned char*>(memory), [bytes](unsigned char* mapped) { munmap(mapped, bytes); }), {}};
}

Mapped create_file(const std::string& name, size_t bytes) {
  const File file(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) return {nullptr, MappingFailure::of(MappingFailure::creating, bytes, errno)};
  // Reserve all of it now: running out of memory on a later access would kill the process.
  int error;
  do {
    error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  Mapped mapped =
      error == 0 ? map(file, bytes) : Mapped{nullptr, MappingFailure::of(MappingFailure::creating, bytes, error)};
  if (mapped.memory == nullptr) shm_unlink(name.c_str());
  return mapped;
}

// Neither memory nor a failure if it does not exist yet.
Mapped open_file(const std::string& name, size_t bytes) {
  const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (file.get() < 0) {
    if (errno == ENOENT) return {};
    return {nullptr, MappingFailure::of(MappingFailure::opening, bytes, errno)};
  }
  struct stat status;
  if (fstat(file.get(), &status) != 0) return {nullptr, MappingFailure::of(MappingFailure::opening, bytes, errno)};
  if (status.st_uid != geteuid()) return {nullptr, MappingFailure::of(MappingFailure::opening, bytes, EACCES)};
  if (static_cast<size_t>(status.st_size) < bytes) return {};  // still being created
  return map(file, bytes);
}

bool has_passed(double seconds, SteadyClock::time_point began) {
  return Pauses::instance().run_since(began) > std::chrono::duration<double>(seconds);
}

bool leaves_room(size_t bytes) {
  struct statvfs system;
  if (statvfs("/dev/shm", &system) != 0 || system.f_blocks == 0) return true;  // 0: without a limit
  const double all = static_cast<double>(system.f_blocks) * system.f_frsize;
  const double free = static_cast<double>(system.f_bavail) * system.f_frsize;
  return free - static_cast<double>(bytes) >= kFreePart * all;
}

// Puts the failed process before a failure's text.
CallFailure about(const std::string& who, CallFailure failure) {
  failure.text.insert(0, who + " ");
  return failure;
}

class MappingError : public CallError {
 public:
  explicit MappingError(const MappingFailure& mapping)
      : CallError(about("this process", mapping.failure())), mapping(mapping) {}
  const MappingFailure mapping;
};

}  // namespace

SharedMemory::SharedMemory(Names names, std::vector<int64_t> processes, int self,
                           std::function<double()> deadline_seconds, std::string host_id)
    : names_(std::move(names)),
      name_(names_.segment(0)),
      processes_(std::move(processes)),
      self_(self),
      deadline_seconds_(std::move(deadline_seconds)),
      host_id_(std::move(host_id)),
      notes_(names_, num_processes(), self),
      failures_(processes_.size()) {}

Memory SharedMemory::connect(size_t bytes, const Stop& stop) {
  try {
    return connect_or_fail(kHeaderBytes + bytes, stop);
  } catch (const MappingError& error) {
    notes_.write(error.mapping);
    throw;
  }
}

Memory SharedMemory::connect_or_fail(size_t bytes, const Stop& stop) {
  // Each process reports it for itself: a note would have no place either.
  if (access("/dev/shm", W_OK | X_OK) != 0)
    throw MappingError(MappingFailure::of(MappingFailure::creating, bytes, errno));
  const double seconds = deadline_seconds_();
  const auto began = SteadyClock::now();
  Mapped mapped = self_ == 0 ? create_file(name_, bytes) : open_file(name_, bytes);
  for (;;) {
    if (mapped.failure.error != 0) throw MappingError(mapped.failure);
    if (mapped.memory != nullptr) break;
    // If another process than the leader has failed, it may be gone together with the segment's name.
    for (int process = 0; process < num_processes(); ++process) {
      if (const std::optional<CallFailure> known = failure_of(process)) {
        CallFailure failure = about(name_of_process(process), *known);
        failure.process = processes_[process];
        failure.cause = failure.text.substr(0, failure.text.size() - 1);
        throw CallError(std::move(failure));
      }
    }
    if (stop()) {
      throw CallError(CallFailure::of(CallFailure::Kind::released,
                                      "the group of processes was released while it was being created."));
    }
    if (has_passed(seconds, began)) give_up_waiting(seconds);
    std::this_thread::sleep_for(kPollInterval);
    mapped = open_file(name_, bytes);
  }
  auto& header = *reinterpret_cast<Header*>(mapped.memory.get());
  if (header.num_mapped.fetch_add(1) + 1 == static_cast<uint32_t>(num_processes())) shm_unlink(name_.c_str());
  // If not all processes map it, the first one to release it unlinks the name.
  unsigned char* const usable = mapped.memory.get() + kHeaderBytes;
  return {usable, [memory = std::move(mapped.memory), name = name_](unsigned char*) mutable {
            shm_unlink(name.c_str());
            memory.reset();
          }};
}

void SharedMemory::give_up_waiting(double seconds) const {
  shm_unlink(name_.c_str());  // the first process may have exited during creation
  const std::string leader = name_of_process(0);
  std::ostringstream text;
  text << leader << ", the group's first, did not create the shared memory within " << seconds
       << " s, or has already released it.";
  if (!host_id_.empty()) {
    text << " JAX_RING_HOST_ID is '" << host_id_ << "' in both processes, so they claim to share a host. If " << leader
         << " has made this call, they do not share /dev/shm: they run in different containers, or on "
         << "different machines. Give those different values of JAX_RING_HOST_ID, or let the containers share /dev/shm "
         << "(docker run --ipc).";
  }
  CallFailure failure = CallFailure::of(CallFailure::Kind::absent, text.str());
  failure.process = processes_[0];
  failure.cause = leader + " did not create the shared memory of a group";
  throw CallError(std::move(failure));
}

Memory SharedMemory::create(uint32_t number, size_t bytes) {
  return leaves_room(bytes) ? create_file(names_.segment(number), bytes).memory : nullptr;
}

Memory SharedMemory::open(uint32_t number, size_t bytes) { return open_file(names_.segment(number), bytes).memory; }

void SharedMemory::unlink(uint32_t number) { shm_unlink(names_.segment(number).c_str()); }

std::optional<CallFailure> SharedMemory::failure_of(int process) {
  std::optional<CallFailure>& known = failures_[process];
  if (known || process == self_) return known;
  if (const std::optional<MappingFailure> mapping = notes_.take(process)) known = mapping->failure();
  return known;
}

void SharedMemory::clean_up(const Stop& stop) {
  const auto began = SteadyClock::now();
  while (!notes_.are_read() && !stop() && !has_passed(deadline_seconds_(), began)) {
    std::this_thread::sleep_for(kPollInterval);
  }
  notes_.remove();
}

}  // namespace jax_ring::shm
