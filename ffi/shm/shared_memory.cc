// shared_memory.cc: creates, opens and maps the memory.
#include "shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace jax_ring::shm {
namespace {

// Before the usable memory, on a page of its own.
struct Header {
  std::atomic<uint32_t> num_mapped;
};
constexpr size_t kHeaderBytes = 4096;

constexpr std::chrono::milliseconds kPollInterval(1);

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

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

Memory map(const File& file, size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes of shared memory", errno);
  return {static_cast<unsigned char*>(memory), [bytes](unsigned char* mapped) { munmap(mapped, bytes); }};
}

Memory create(const std::string& name, size_t bytes) {
  const File file(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("shm_open of " + name, errno);
  try {
    // Reserves all of it now: running out of memory on a later access would kill the process.
    int error;
    do {
      error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0) {
      fail("jax_ring needs " + std::to_string(bytes >> 10) +
               " KiB of shared memory for a group of processes (/dev/shm; in a container, raise it with "
               "docker run --shm-size)",
           error);
    }
    return map(file, bytes);
  } catch (...) {
    shm_unlink(name.c_str());
    throw;
  }
}

// Null if it does not exist yet.
Memory find(const std::string& name, size_t bytes) {
  const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (file.get() < 0) {
    if (errno == ENOENT) return nullptr;
    fail("shm_open of " + name, errno);
  }
  struct stat status;
  if (fstat(file.get(), &status) != 0) fail("fstat of " + name, errno);
  if (status.st_uid != geteuid()) throw std::runtime_error(name + " belongs to another user");
  if (static_cast<size_t>(status.st_size) < bytes) return nullptr;  // still being created
  return map(file, bytes);
}

}  // namespace

Memory map_shared(const std::string& name, size_t bytes, bool first, int num_processes, double deadline_seconds,
                  const Communicator::Stop& stop) {
  const size_t whole = kHeaderBytes + bytes;
  Memory memory = first ? create(name, whole) : nullptr;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_seconds);
  while (memory == nullptr) {
    memory = find(name, whole);
    if (memory != nullptr) break;
    if (stop()) throw std::runtime_error("the group of processes was released while it was being created.");
    if (std::chrono::steady_clock::now() > end) {
      shm_unlink(name.c_str());  // the first process may have exited while creating it
      std::ostringstream text;
      text << "the group's first process did not create the shared memory within " << deadline_seconds
           << " s, or has already released it.";
      throw std::runtime_error(text.str());
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  auto& header = *reinterpret_cast<Header*>(memory.get());
  if (header.num_mapped.fetch_add(1) + 1 == static_cast<uint32_t>(num_processes)) shm_unlink(name.c_str());
  // If not all processes map it, the first one to release it unlinks the name.
  unsigned char* const usable = memory.get() + kHeaderBytes;
  return {usable, [memory, name](unsigned char*) mutable {
            shm_unlink(name.c_str());
            memory.reset();
          }};
}

}  // namespace jax_ring::shm
