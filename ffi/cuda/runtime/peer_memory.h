// peer_memory.h: GPU memory that other GPUs of the host, in this process or others, can read and write.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace jax_ring::gpu {

// Memory on several GPUs that all of them can access, in parts of one size.
struct MulticastMemory {
  std::vector<void*> parts;  // one on each GPU
  void* all = nullptr;       // address where multimem instructions reach all parts at once
};

// The memory operations that a communicator needs. An interface, so that it can be tested without a GPU. `device` is a
// CUDA ordinal: an index among the GPUs that this process sees. Functions throw std::runtime_error with the reason if
// they fail; those that release do not fail. None waits for the work of a stream other than its own, so they may be
// called while a kernel waits for another rank. Only `release` may wait for the device.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Zeroed device memory.
  virtual void* allocate(int device, size_t bytes) = 0;
  // Waits for all work of the device first.
  virtual void release(int device, void* memory) noexcept = 0;

  // Zeroed host memory that all GPUs of this process can write. device: the GPU whose context pins it.
  virtual void* allocate_on_host(int device, size_t bytes) = 0;
  virtual void release_on_host(int device, void* memory) noexcept = 0;

  // Whether a device can access a peer's memory, and enabling that access.
  virtual bool can_access(int device, int peer) = 0;
  virtual void enable_access(int device, int peer) = 0;

  // A handle with which other processes can map this memory; mapping such a handle on `device`; and unmapping it.
  virtual std::string export_handle(int device, void* memory) = 0;
  virtual void* import_handle(int device, const std::string& handle) = 0;
  virtual void close_handle(int device, void* memory) noexcept = 0;

  // Memory of this process's GPUs that an NVSwitch can reach at once. Why these GPUs have none, or an empty string;
  // zeroed memory, one part per device, in their order; and its release, once all work of the devices that can reach it
  // has ended.
  virtual std::string why_no_multicast(const std::vector<int>& /*devices*/) { return "it is not there"; }
  virtual MulticastMemory allocate_multicast(const std::vector<int>& devices, size_t /*bytes*/) {
    throw std::runtime_error(why_no_multicast(devices));
  }
  virtual void release_multicast(const std::vector<int>& /*devices*/, const MulticastMemory&) noexcept {}

  // Runs everything whose first use must not happen while another rank waits.
  virtual void warm_up(int device) = 0;
};

}  // namespace jax_ring::gpu
