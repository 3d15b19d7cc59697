// multicast_memory.h: memory on several GPUs behind one NVSwitch address, through the CUDA driver.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/runtime/peer_memory.h"

namespace jax_ring::gpu {

// All such memory of this process. The functions implement PeerMemory's. The caller first gives each device a context,
// writes the zeros, and waits for the devices' work before a release.
class MulticastAllocations {
 public:
  MulticastAllocations();
  ~MulticastAllocations();
  MulticastAllocations(const MulticastAllocations&) = delete;
  MulticastAllocations& operator=(const MulticastAllocations&) = delete;

  std::string why_no_multicast(const std::vector<int>& devices);
  MulticastMemory allocate(const std::vector<int>& devices, size_t bytes);
  void release(const MulticastMemory& memory) noexcept;

 private:
  class Allocation;
  std::mutex mutex_;
  std::map<const void*, std::unique_ptr<Allocation>> by_address_;  // by the address that reaches all parts
};

}  // namespace jax_ring::gpu
