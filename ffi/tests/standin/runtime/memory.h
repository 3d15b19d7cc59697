// memory.h: the memory of absent GPUs. Other processes can map allocations, and each allocation knows its users.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace jax_ring::standin {

// The first page of every allocation, visible to all processes that map it.
struct Control {
  uint64_t name;                // unique, so that a handle never names other memory
  std::atomic<int> users;       // kernels of any process that can reach the memory
  std::atomic<uint32_t> freed;  // by its owner
};

struct Allocation {
  enum Kind { device, host, imported, multicast };
  Kind kind;
  int gpu;  // where it is, or where it was imported
  unsigned char* base;
  size_t bytes;
  int file;
  Control* control;
  int local_users = 0;                  // kernels of this process
  bool is_at_reserved_address = false;  // and stays reserved after the release
  std::set<int> gpus_with_access = {};  // of memory at such an address
};

// The allocations of this process.
class Memory {
 public:
  static Memory& instance();

  cudaError_t allocate(Allocation::Kind kind, int gpu, size_t bytes, void** memory);
  // At a reserved address, with a page before it. Behind a multicast address there is nothing.
  cudaError_t allocate_at(Allocation::Kind kind, int gpu, size_t bytes, unsigned char* at);
  void give_access(void* memory, int gpu);
  // Frees or unmaps it. Records a violation if a kernel can still reach it.
  cudaError_t release(Allocation::Kind kind, void* memory, const char* function);
  cudaError_t export_handle(void* memory, int gpu, cudaIpcMemHandle_t* handle);
  cudaError_t import_handle(const cudaIpcMemHandle_t& handle, int gpu, void** memory);

  // Writes a value to the allocation's memory, as a stream does.
  static void fill(unsigned char* memory, int value, size_t bytes);

  // From now until unpin(), a kernel on `gpu` uses these addresses. Records violations: no such memory, no access,
  // freed.
  void pin(int gpu, const std::vector<const void*>& addresses);
  void unpin(const std::vector<const void*>& addresses);

  // Allocations that have not been released.
  size_t count() const;
  // The addresses of allocations of at least this many bytes.
  std::vector<const void*> addresses(size_t at_least) const;

 private:
  Allocation* find(const void* address);  // requires mutex_

  mutable std::mutex mutex_;
  std::map<const unsigned char*, Allocation> by_base_;
};

}  // namespace jax_ring::standin
