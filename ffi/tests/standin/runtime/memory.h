// memory.h: the memory of GPUs that are not there. Allocations can be mapped by other processes, and know who uses
// them.
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

// The first page of every allocation, which all processes that map it see.
struct Control {
  uint64_t name;                // unique, so that a handle never names other memory
  std::atomic<int> users;       // kernels of any process that can reach the memory
  std::atomic<uint32_t> freed;  // by its owner
};

struct Allocation {
  enum Kind { device, host, imported, multicast };
  Kind kind;
  int gpu;  // that it is on, or on which it was imported
  unsigned char* base;
  size_t bytes;
  int file;
  Control* control;
  int local_users = 0;                  // kernels of this process
  bool is_at_reserved_address = false;  // and stays reserved when this is released
  std::set<int> gpus_with_access = {};  // of memory at such an address
};

// The allocations of this process.
class Memory {
 public:
  static Memory& instance();

  cudaError_t allocate(Allocation::Kind kind, int gpu, size_t bytes, void** memory);
  // At an address that is reserved, with a page before it. Behind a multicast address there is nothing.
  cudaError_t allocate_at(Allocation::Kind kind, int gpu, size_t bytes, unsigned char* at);
  void give_access(void* memory, int gpu);
  // Frees or unmaps it. Records a violation if a kernel can still reach it.
  cudaError_t release(Allocation::Kind kind, void* memory, const char* function);
  cudaError_t export_handle(void* memory, int gpu, cudaIpcMemHandle_t* handle);
  cudaError_t import_handle(const cudaIpcMemHandle_t& handle, int gpu, void** memory);

  // Writes a value to the allocation's memory, as a stream does.
  static void fill(unsigned char* memory, int value, size_t bytes);

  // A kernel on `gpu` reaches these addresses until unpin(). Records violations: no such memory, no access, freed.
  void pin(int gpu, const std::vector<const void*>& addresses);
  void unpin(const std::vector<const void*>& addresses);

  // Allocations that have not been released.
  size_t count() const;
  // Those of at least so many bytes.
  std::vector<const void*> addresses(size_t at_least) const;

 private:
  Allocation* find(const void* address);  // with mutex_ held

  mutable std::mutex mutex_;
  std::map<const unsigned char*, Allocation> by_base_;
};

}  // namespace jax_ring::standin
