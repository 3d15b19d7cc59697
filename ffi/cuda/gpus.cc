// gpus.cc: the calls of the CUDA runtime behind Gpus.
#include "cuda/gpus.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>

#include "cuda/kernels.h"

namespace jax_ring::gpu {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// Makes a device current on the calling thread, and restores the previous one.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

class CudaGpus final : public Gpus {
 public:
  // Not from a memory pool, whose handles are of another kind.
  void* allocate(int device, size_t bytes) override {
    const OnDevice on(device);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc of a mailbox");
    check(cudaMemset(memory, 0, bytes), "cudaMemset of a mailbox");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return memory;
  }

  void release(int device, void* memory) override {
    const OnDevice on(device);
    cudaFree(memory);
  }

  void* allocate_on_host(size_t bytes) override {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    return memory;
  }

  void release_on_host(void* memory) override { cudaFreeHost(memory); }

  bool can_access(int device, int peer) override {
    if (device == peer) return true;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
    return can != 0;
  }

  void enable_access(int device, int peer) override {
    if (device == peer) return;
    const OnDevice on(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // XLA enables it as well; clear the error, or a later check elsewhere would report it
      return;
    }
    check(error, "cudaDeviceEnablePeerAccess");
  }

  std::string export_handle(int device, void* memory) override {
    const OnDevice on(device);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
    return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }

  void* import_handle(int device, const std::string& exported) override {
    cudaIpcMemHandle_t handle;
    if (exported.size() != sizeof(handle)) throw std::runtime_error("a peer published an invalid CUDA memory handle");
    std::memcpy(&handle, exported.data(), sizeof(handle));
    const OnDevice on(device);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return memory;
  }

  void close_handle(int device, void* memory) override {
    const OnDevice on(device);
    cudaIpcCloseMemHandle(memory);
  }

  void warm_up(int device) override {
    const OnDevice on(device);
    check(load_kernels(), "loading the kernels");
  }

  bool has_kernel(const KernelKey& key) const override { return gpu::has_kernel(key); }

  void launch(const KernelKey& key, const Call& call, Stream stream) override {
    check(gpu::launch(key, call, static_cast<cudaStream_t>(stream)), "launch");
  }
};

}  // namespace

std::unique_ptr<Gpus> cuda_gpus() { return std::make_unique<CudaGpus>(); }

}  // namespace jax_ring::gpu
