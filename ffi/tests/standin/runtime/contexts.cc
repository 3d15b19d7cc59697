// contexts.cc: the absent machine's devices: their properties, contexts, and access to each other.
#include <cstdio>
#include <cstring>

#include "tests/standin/runtime/machine.h"
#include "tests/standin/runtime/multicast.h"

namespace jax_ring::standin {
namespace {

// A CUcontext is the address of its GPU's entry.
constexpr int kMostGpus = 16;
char contexts[kMostGpus];

bool exists(int gpu) { return gpu >= 0 && gpu < Machine::instance().hardware().num_gpus; }

// The driver's functions return its own error type, an int.
int get_current_context(void** context) {
  Machine::instance().enter("cuCtxGetCurrent");
  *context = current_gpu() < 0 ? nullptr : &contexts[current_gpu()];
  return 0;
}

int set_current_context(void* context) {
  Machine::instance().enter("cuCtxSetCurrent");
  set_current_gpu(context == nullptr ? -1 : static_cast<int>(static_cast<char*>(context) - contexts));
  return 0;
}

}  // namespace
}  // namespace jax_ring::standin

using namespace jax_ring::standin;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  const cudaError_t error = Machine::instance().enter("cudaGetDeviceCount");
  if (error == cudaSuccess) *count = Machine::instance().hardware().num_gpus;
  return Machine::leave(error);
}

cudaError_t cudaGetDevice(int* gpu) {
  const cudaError_t error = Machine::instance().enter("cudaGetDevice");
  if (error == cudaSuccess) *gpu = current_gpu() < 0 ? 0 : current_gpu();
  return Machine::leave(error);
}

// Since CUDA 12 this creates the GPU's context.
cudaError_t cudaSetDevice(int gpu) {
  cudaError_t error = Machine::instance().enter("cudaSetDevice");
  if (error == cudaSuccess && !exists(gpu)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    Machine::instance().create_context(gpu, "cudaSetDevice");
    set_current_gpu(gpu);
  }
  return Machine::leave(error);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int gpu, int peer) {
  cudaError_t error = Machine::instance().enter("cudaDeviceCanAccessPeer");
  if (error == cudaSuccess && (!exists(gpu) || !exists(peer))) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) *can = gpu != peer && !Machine::instance().is_severed(gpu, peer);
  return Machine::leave(error);
}

// Gives the peer a context as well.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int) {
  Machine& machine = Machine::instance();
  cudaError_t error = machine.enter("cudaDeviceEnablePeerAccess");
  if (error == cudaSuccess && !exists(peer)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    const int gpu = required_gpu("cudaDeviceEnablePeerAccess");
    const DriverLock lock("cudaDeviceEnablePeerAccess");
    error = machine.enable_access(gpu, peer);
    if (error == cudaSuccess) machine.create_context(peer, "cudaDeviceEnablePeerAccess");
  }
  return Machine::leave(error);
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int gpu) {
  cudaError_t error = Machine::instance().enter("cudaDeviceGetPCIBusId");
  if (error == cudaSuccess && !exists(gpu)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) std::snprintf(id, size, "0000:%02x:00.0", gpu + 1);
  return Machine::leave(error);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int gpu) {
  cudaError_t error = Machine::instance().enter("cudaGetDeviceProperties");
  if (error == cudaSuccess && !exists(gpu)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "GPU that is not there");
    properties->uuid.bytes[0] = static_cast<char>(gpu + 1);
    properties->major = 9;
    properties->multiProcessorCount = 132;
  }
  return Machine::leave(error);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int gpu) {
  cudaError_t error = Machine::instance().enter("cudaDeviceGetAttribute");
  if (error == cudaSuccess && !exists(gpu)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return Machine::leave(error);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  cudaError_t error = Machine::instance().enter("cudaGetDriverEntryPointByVersion");
  if (error != cudaSuccess) return Machine::leave(error);
  *function = std::strcmp(symbol, "cuCtxGetCurrent") == 0   ? reinterpret_cast<void*>(&get_current_context)
              : std::strcmp(symbol, "cuCtxSetCurrent") == 0 ? reinterpret_cast<void*>(&set_current_context)
                                                            : multicast_function(symbol);
  if (status != nullptr)
    *status = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return Machine::leave(*function != nullptr ? cudaSuccess : cudaErrorSymbolNotFound);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define JAX_RING_NAME(name) \
  case name:                \
    return #name;
    JAX_RING_NAME(cudaSuccess)
    JAX_RING_NAME(cudaErrorInvalidValue)
    JAX_RING_NAME(cudaErrorMemoryAllocation)
    JAX_RING_NAME(cudaErrorInvalidDevice)
    JAX_RING_NAME(cudaErrorDeviceUninitialized)
    JAX_RING_NAME(cudaErrorPeerAccessUnsupported)
    JAX_RING_NAME(cudaErrorPeerAccessAlreadyEnabled)
    JAX_RING_NAME(cudaErrorInvalidResourceHandle)
    JAX_RING_NAME(cudaErrorMapBufferObjectFailed)
    JAX_RING_NAME(cudaErrorLaunchFailure)
    JAX_RING_NAME(cudaErrorLaunchOutOfResources)
    JAX_RING_NAME(cudaErrorLaunchTimeout)
    JAX_RING_NAME(cudaErrorStreamCaptureUnsupported)
    JAX_RING_NAME(cudaErrorStreamCaptureInvalidated)
    JAX_RING_NAME(cudaErrorInvalidDeviceFunction)
    JAX_RING_NAME(cudaErrorNoKernelImageForDevice)
    JAX_RING_NAME(cudaErrorSymbolNotFound)
#undef JAX_RING_NAME
    default:
      return "an error that the stand-in has no name for";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorPeerAccessUnsupported:
      return "peer access is not supported between these two devices";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    default:
      return cudaGetErrorName(error);
  }
}

}  // extern "C"
