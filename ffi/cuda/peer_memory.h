// peer_memory.h: memory of GPUs that other GPUs, of this process or of others on the host, can read and write.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace jax_ring::gpu {

// What a communicator needs of the machine. An interface, so that it can be tried where there is no GPU.
// All functions throw std::runtime_error with the reason when they fail. `device` counts this process's GPUs.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Zeroed memory of the device.
  virtual void* allocate(int device, size_t bytes) = 0;
  virtual void release(int device, void* memory) = 0;

  // Zeroed memory of the host that all GPUs of this process can write.
  virtual void* allocate_on_host(size_t bytes) = 0;
  virtual void release_on_host(void* memory) = 0;

  // Whether one device can be given access to the other's memory, and giving it.
  virtual bool can_access(int device, int peer) = 0;
  virtual void enable_access(int device, int peer) = 0;

  // What another process needs to reach this memory; and reaching it, from `device`.
  virtual std::string export_handle(int device, void* memory) = 0;
  virtual void* import_handle(int device, const std::string& handle) = 0;
  virtual void close_handle(int device, void* memory) = 0;

  // Does whatever must not be done for the first time while another rank waits.
  virtual void warm_up(int device) = 0;
};

// The GPUs of this machine, by the CUDA runtime.
std::unique_ptr<PeerMemory> cuda_peer_memory();

}  // namespace jax_ring::gpu
