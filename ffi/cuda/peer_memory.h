// peer_memory.h: GPU memory that other GPUs of the host, in this process or others, can read and write.
#pragma once

#include <cstddef>
#include <string>

namespace jax_ring::gpu {

// What a communicator needs from the machine. An interface, so that it can be tested without a GPU.
// All functions throw std::runtime_error with the reason if they fail. `device` is an index among this process's GPUs.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Zeroed device memory.
  virtual void* allocate(int device, size_t bytes) = 0;
  virtual void release(int device, void* memory) = 0;

  // Zeroed host memory that all GPUs of this process can write.
  virtual void* allocate_on_host(size_t bytes) = 0;
  virtual void release_on_host(void* memory) = 0;

  // Whether a device can access a peer's memory, and enabling that access.
  virtual bool can_access(int device, int peer) = 0;
  virtual void enable_access(int device, int peer) = 0;

  // A handle by which other processes can map this memory; mapping such a handle on `device`; and unmapping it.
  virtual std::string export_handle(int device, void* memory) = 0;
  virtual void* import_handle(int device, const std::string& handle) = 0;
  virtual void close_handle(int device, void* memory) = 0;

  // Does everything whose first use must not happen while another rank waits.
  virtual void warm_up(int device) = 0;
};

}  // namespace jax_ring::gpu
