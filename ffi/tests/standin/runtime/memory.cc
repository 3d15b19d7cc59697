// memory.cc: cudaMalloc, cudaHostAlloc and CUDA IPC, on unnamed files of shared memory.
#include "tests/standin/runtime/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <random>

#include "tests/standin/runtime/machine.h"
#include "tests/standin/runtime/streams.h"

namespace jax_ring::standin {
namespace {

constexpr size_t kPage = 4096;
// GPU memory is not zero when allocated. Filling more would only cost time: the counters and flags come first.
constexpr size_t kDirtied = 64 << 10;
constexpr unsigned char kDirt = 0xa5;

struct Handle {
  int64_t process;
  int file;
  uint64_t name;
  size_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

uint64_t unique_name() {
  static std::atomic<uint64_t> next{0};
  return (static_cast<uint64_t>(getpid()) << 32) + ++next;
}

Control* map(int file, size_t bytes) {
  void* const mapped = mmap(nullptr, kPage + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<Control*>(mapped);
}

size_t rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Memory& Memory::instance() {
  static auto* const memory = new Memory;  // never destroyed: threads of streams may outlive static objects
  return *memory;
}

cudaError_t Memory::allocate(Allocation::Kind kind, int gpu, size_t bytes, void** memory) {
  const int file = memfd_create("jax_ring_standin", MFD_CLOEXEC);
  const size_t size = rounded(bytes);
  Control* const control =
      file >= 0 && ftruncate(file, static_cast<off_t>(kPage + size)) == 0 ? map(file, size) : nullptr;
  if (control == nullptr) {
    if (file >= 0) close(file);
    return cudaErrorMemoryAllocation;
  }
  new (control) Control{unique_name(), {0}, {0}};
  unsigned char* const base = reinterpret_cast<unsigned char*>(control) + kPage;
  std::memset(base, kDirt, size < kDirtied ? size : kDirtied);
  const std::lock_guard<std::mutex> lock(mutex_);
  by_base_[base] = {kind, gpu, base, size, file, control, 0, false, {}};
  *memory = base;
  return cudaSuccess;
}

cudaError_t Memory::allocate_at(Allocation::Kind kind, int gpu, size_t bytes, unsigned char* at) {
  const size_t mapped = kPage + (kind == Allocation::multicast ? 0 : bytes);
  const int file = memfd_create("jax_ring_standin", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(mapped)) != 0) return cudaErrorMemoryAllocation;
  void* const page = mmap(at - kPage, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  if (page == MAP_FAILED) return cudaErrorMemoryAllocation;
  auto* const control = new (page) Control{unique_name(), {0}, {0}};
  if (kind != Allocation::multicast) std::memset(at, kDirt, bytes < kDirtied ? bytes : kDirtied);
  const std::lock_guard<std::mutex> lock(mutex_);
  by_base_[at] = {kind, gpu, at, bytes, file, control, 0, true, {}};
  return cudaSuccess;
}

void Memory::give_access(void* memory, int gpu) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Allocation* const found = find(memory)) found->gpus_with_access.insert(gpu);
}

cudaError_t Memory::release(Allocation::Kind kind, void* memory, const char* function) {
  if (memory == nullptr) return cudaSuccess;
  Allocation released;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_base_.find(static_cast<unsigned char*>(memory));
    if (found == by_base_.end() || found->second.kind != kind) return cudaErrorInvalidValue;
    released = found->second;
    by_base_.erase(found);
  }
  const int users = kind == Allocation::imported ? released.local_users : released.control->users.load();
  if (users > 0) {
    Machine::instance().violate(std::string(function) + " of memory that a running kernel can reach");
    return cudaSuccess;  // stays mapped, so that the test goes on
  }
  if (kind != Allocation::imported) released.control->freed.store(1);
  if (released.is_at_reserved_address) {
    mmap(released.control, kPage + released.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
  } else {
    munmap(released.control, kPage + released.bytes);
  }
  close(released.file);
  return cudaSuccess;
}

cudaError_t Memory::export_handle(void* memory, int gpu, cudaIpcMemHandle_t* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_base_.find(static_cast<unsigned char*>(memory));
  if (found == by_base_.end() || found->second.kind != Allocation::device) return cudaErrorInvalidValue;
  if (found->second.gpu != gpu) return cudaErrorInvalidValue;
  const Handle exported{getpid(), found->second.file, found->second.control->name, found->second.bytes};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &exported, sizeof(exported));
  return cudaSuccess;
}

cudaError_t Memory::import_handle(const cudaIpcMemHandle_t& handle, int gpu, void** memory) {
  Handle exported;
  std::memcpy(&exported, &handle, sizeof(exported));
  if (exported.process == getpid()) return cudaErrorDeviceUninitialized;  // as CUDA does
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/fd/%d", static_cast<long long>(exported.process), exported.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return cudaErrorInvalidResourceHandle;
  Control* const control = map(file, exported.bytes);
  if (control == nullptr || control->name != exported.name || control->freed.load() != 0) {
    if (control != nullptr) munmap(control, kPage + exported.bytes);
    close(file);
    return cudaErrorInvalidResourceHandle;
  }
  unsigned char* const base = reinterpret_cast<unsigned char*>(control) + kPage;
  const std::lock_guard<std::mutex> lock(mutex_);
  by_base_[base] = {Allocation::imported, gpu, base, exported.bytes, file, control, 0, false, {}};
  *memory = base;
  return cudaSuccess;
}

void Memory::fill(unsigned char* memory, int value, size_t bytes) {
  const size_t head = bytes < kDirtied ? bytes : kDirtied;
  std::memset(memory, value, head);
  if (head == bytes) return;
  // The rest is zero already, or becomes so by removing its pages, which is faster.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + head + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (value == 0 && begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE) == 0) {
    std::memset(memory + head, 0, begin - reinterpret_cast<uintptr_t>(memory) - head);
    std::memset(reinterpret_cast<void*>(end), 0, reinterpret_cast<uintptr_t>(memory) + bytes - end);
  } else {
    std::memset(memory + head, value, bytes - head);
  }
}

Allocation* Memory::find(const void* address) {
  const auto* const wanted = static_cast<const unsigned char*>(address);
  auto after = by_base_.upper_bound(wanted);
  if (after == by_base_.begin()) return nullptr;
  Allocation& found = (--after)->second;
  return wanted < found.base + found.bytes ? &found : nullptr;
}

void Memory::pin(int gpu, const std::vector<const void*>& addresses) {
  Machine& machine = Machine::instance();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const void* address : addresses) {
    Allocation* const found = find(address);
    if (found == nullptr) {
      machine.violate("a kernel was launched with an address that is not allocated");
      continue;
    }
    if (found->control->freed.load() != 0)
      machine.violate("a kernel was launched with memory that its owner has freed");
    const bool reachable = found->is_at_reserved_address
                               ? found->gpus_with_access.count(gpu) > 0
                               : found->kind == Allocation::host || found->gpu == gpu ||
                                     (found->kind == Allocation::device && machine.has_access(gpu, found->gpu));
    if (!reachable) {
      machine.violate("GPU " + std::to_string(gpu) + " has no access to memory of GPU " + std::to_string(found->gpu));
    }
    ++found->local_users;
    found->control->users.fetch_add(1);
  }
}

void Memory::unpin(const std::vector<const void*>& addresses) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const void* address : addresses) {
    Allocation* const found = find(address);
    if (found == nullptr) continue;
    --found->local_users;
    found->control->users.fetch_sub(1);
  }
}

std::vector<const void*> Memory::addresses(size_t at_least) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const void*> all;
  for (const auto& [base, allocation] : by_base_) {
    if (allocation.bytes >= at_least) all.push_back(base);
  }
  return all;
}

size_t Memory::count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_base_.size();
}

namespace {

// For functions that take the driver's lock, and that a thread must not call during a capture.
template <class Function>
cudaError_t unsafe_call(const char* function, Function body) {
  Machine& machine = Machine::instance();
  if (stage_of_thread == Stage::execute) machine.violate(std::string(function) + " while a call is executed");
  cudaError_t error = machine.enter(function);
  if (error == cudaSuccess && !machine.may_make_unsafe_call(function)) error = cudaErrorStreamCaptureUnsupported;
  if (error == cudaSuccess) {
    const DriverLock lock(function);
    error = body();
  }
  return Machine::leave(error);
}

}  // namespace
}  // namespace jax_ring::standin

using namespace jax_ring::standin;

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return unsafe_call("cudaMalloc", [&] {
    return Memory::instance().allocate(Allocation::device, required_gpu("cudaMalloc"), bytes, memory);
  });
}

cudaError_t cudaFree(void* memory) {
  return unsafe_call("cudaFree", [&] {
    wait_for_gpu(required_gpu("cudaFree"));
    return Memory::instance().release(Allocation::device, memory, "cudaFree");
  });
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  return unsafe_call("cudaHostAlloc", [&] {
    return Memory::instance().allocate(Allocation::host, required_gpu("cudaHostAlloc"), bytes, memory);
  });
}

cudaError_t cudaFreeHost(void* memory) {
  return unsafe_call("cudaFreeHost", [&] {
    wait_for_gpu(required_gpu("cudaFreeHost"));
    return Memory::instance().release(Allocation::host, memory, "cudaFreeHost");
  });
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return unsafe_call("cudaIpcGetMemHandle", [&] {
    return Memory::instance().export_handle(memory, required_gpu("cudaIpcGetMemHandle"), handle);
  });
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned int) {
  return unsafe_call("cudaIpcOpenMemHandle", [&] {
    return Memory::instance().import_handle(handle, required_gpu("cudaIpcOpenMemHandle"), memory);
  });
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  return unsafe_call("cudaIpcCloseMemHandle", [&] {
    wait_for_gpu(required_gpu("cudaIpcCloseMemHandle"));
    return Memory::instance().release(Allocation::imported, memory, "cudaIpcCloseMemHandle");
  });
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  return unsafe_call("cudaMemset", [&] {
    Machine::instance().violate("cudaMemset on the legacy stream, which waits for other streams' kernels");
    required_gpu("cudaMemset");
    Memory::fill(static_cast<unsigned char*>(memory), value, bytes);
    return cudaSuccess;
  });
}

}  // extern "C"
