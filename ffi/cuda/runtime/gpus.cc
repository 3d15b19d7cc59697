// gpus.cc: the CUDA runtime behind Gpus.
//
// It calls: cudaSetDevice, cudaMalloc, cudaFree, cudaMemsetAsync, cudaStreamCreateWithFlags, cudaStreamSynchronize,
// cudaStreamDestroy, cudaStreamIsCapturing, cudaThreadExchangeStreamCaptureMode, cudaHostAlloc, cudaFreeHost,
// cudaDeviceCanAccessPeer, cudaDeviceEnablePeerAccess, cudaIpcGetMemHandle, cudaIpcOpenMemHandle,
// cudaIpcCloseMemHandle, cudaGetDeviceCount, cudaDeviceGetPCIBusId, cudaGetDeviceProperties, cudaGetLastError,
// cudaGetErrorString, cudaGetErrorName, cudaGetDriverEntryPointByVersion (cuCtxGetCurrent, cuCtxSetCurrent), and those
// of kernels.cc and multicast_memory.cc. Nothing here waits for a whole device but cudaFree, or uses the legacy stream.
#include "cuda/runtime/gpus.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/kernels/kernels.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/multicast_memory.h"
#include "cuda/runtime/profiler_range.h"

namespace jax_ring::gpu {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the text below reports the error, and XLA's next check must not
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// The driver's current context of the calling thread, without linking the driver.
struct CurrentContext {
  CUresult (*get)(CUcontext*) = nullptr;
  CUresult (*set)(CUcontext) = nullptr;

  CurrentContext() {
    find_driver_function("cuCtxGetCurrent", 12000, &get);
    find_driver_function("cuCtxSetCurrent", 12000, &set);
  }

  static const CurrentContext& functions() {
    static const CurrentContext all;
    return all;
  }
};

// Makes a device current on the calling thread, and later restores the previous state. That may have been no device,
// and must become so again: selecting any device instead, such as the first, would create a context on it. That takes
// half a gigabyte there for each process of the host.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (CurrentContext::functions().get(&before_) != CUDA_SUCCESS) before_ = nullptr;  // the driver is not initialized
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { CurrentContext::functions().set(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  CUcontext before_ = nullptr;
};

// Another thread may be capturing. Allocations would invalidate its capture, unless this thread declares that it is not
// involved.
class OutsideCaptures {
 public:
  OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream of its own: the legacy stream waits for all others.
class PrivateStream {
 public:
  PrivateStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~PrivateStream() { cudaStreamDestroy(stream_); }
  PrivateStream(const PrivateStream&) = delete;
  PrivateStream& operator=(const PrivateStream&) = delete;

  void zero(void* memory, size_t bytes) {
    check(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// Runs an action that must not throw. At the end of a program CUDA may be gone, with all memory.
template <class Action>
void quietly(int device, Action action) noexcept {
  try {
    const OutsideCaptures outside;
    const OnDevice on(device);
    if (action() != cudaSuccess) cudaGetLastError();
  } catch (const std::exception&) {
  }
}

class CudaGpus final : public Gpus {
 public:
  // Not from a memory pool: its handles are of another kind.
  void* allocate(int device, size_t bytes) override {
    const OutsideCaptures outside;
    const OnDevice on(device);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    try {
      PrivateStream().zero(memory, bytes);
    } catch (...) {
      cudaFree(memory);
      throw;
    }
    return memory;
  }

  // cudaFree waits for the device's work, except for memory of pools.
  void release(int device, void* memory) noexcept override {
    quietly(device, [&] { return cudaFree(memory); });
  }

  void* allocate_on_host(int device, size_t bytes) override {
    const OutsideCaptures outside;
    const OnDevice on(device);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    return memory;
  }

  void release_on_host(int device, void* memory) noexcept override {
    quietly(device, [&] { return cudaFreeHost(memory); });
  }

  bool can_access(int device, int peer) override {
    if (device == peer) return true;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
    return can != 0;
  }

  void enable_access(int device, int peer) override {
    if (device == peer) return;
    const OutsideCaptures outside;
    const OnDevice on(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // XLA enables it as well: clear the error, or a later check elsewhere would report it
      return;
    }
    check(error, "cudaDeviceEnablePeerAccess");
  }

  std::string export_handle(int device, void* memory) override {
    const OutsideCaptures outside;
    const OnDevice on(device);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
    return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }

  void* import_handle(int device, const std::string& exported) override {
    cudaIpcMemHandle_t handle;
    if (exported.size() != sizeof(handle)) {
      throw std::runtime_error("the memory handle has " + std::to_string(exported.size()) + " bytes, and CUDA's have " +
                               std::to_string(sizeof(handle)));
    }
    std::memcpy(&handle, exported.data(), sizeof(handle));
    const OutsideCaptures outside;
    const OnDevice on(device);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return memory;
  }

  void close_handle(int device, void* memory) noexcept override {
    quietly(device, [&] { return cudaIpcCloseMemHandle(memory); });
  }

  std::string why_no_multicast(const std::vector<int>& devices) override {
    const OutsideCaptures outside;
    return multicast_.why_no_multicast(devices);
  }

  MulticastMemory allocate_multicast(const std::vector<int>& devices, size_t bytes) override {
    const OutsideCaptures outside;
    for (int device : devices) OnDevice give_it_a_context(device);
    const MulticastMemory memory = multicast_.allocate(devices, bytes);
    try {
      for (size_t i = 0; i < devices.size(); ++i) {
        const OnDevice on(devices[i]);
        PrivateStream().zero(memory.parts[i], bytes);
      }
    } catch (...) {
      multicast_.release(memory);
      throw;
    }
    return memory;
  }

  void release_multicast(const std::vector<int>& devices, const MulticastMemory& memory) noexcept override {
    quietly(devices[0], [&] {
      multicast_.release(memory);
      return cudaSuccess;
    });
  }

  void warm_up(int device) override {
    const OutsideCaptures outside;
    const OnDevice on(device);
    check(load_kernels(), "loading the kernels");
  }

  std::vector<Identity> identities() override {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<Identity> all;
    for (int device = 0; device < count; ++device) {
      Identity identity;
      char bus_id[32] = {};
      check(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device), "cudaDeviceGetPCIBusId");
      identity.bus_id = bus_id;
      cudaDeviceProp properties{};
      check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
      for (const char byte : properties.uuid.bytes) {
        char digits[3];
        std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
        identity.uuid += digits;
      }
      all.push_back(std::move(identity));
    }
    return all;
  }

  bool has_kernel(const KernelKey& key) const override { return gpu::has_kernel(key); }

  void launch(const KernelKey& key, const Call& call, Stream stream) override {
    check(gpu::launch(key, call, static_cast<cudaStream_t>(stream)), "launch");
  }

  void begin_range(const char* name) noexcept override { begin_profiler_range(name); }
  void end_range() noexcept override { end_profiler_range(); }

  bool is_capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  MulticastAllocations multicast_;
};

}  // namespace

std::unique_ptr<Gpus> cuda_gpus() { return std::make_unique<CudaGpus>(); }

}  // namespace jax_ring::gpu
