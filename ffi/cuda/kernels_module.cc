// kernels_module.cc: the Python module `_cuda_kernels`: the kernels and the CUDA runtime, for `_ffi_cuda`.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/gpus.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

jax_ring::gpu::Gpus& gpus() {
  // Never destroyed: the CUDA runtime shuts down before static destructors run.
  static jax_ring::gpu::Gpus* const all = jax_ring::gpu::cuda_gpus().release();
  return *all;
}

}  // namespace

NB_MODULE(_cuda_kernels, m) {
  m.doc() = "The GPU kernels of jax_ring, and the CUDA runtime that they need.";

  m.def("fingerprint", [] { return JAX_RING_FINGERPRINT; }, "The fingerprint of the sources that this was built from.");

  m.def(
      "gpus", [] { return nb::capsule(static_cast<void*>(&gpus()), jax_ring::gpu::Gpus::kCapsule); },
      "The GPUs of this machine, for `_ffi_cuda`.");

  m.def(
      "device_count",
      [] {
        int count = 0;
        const cudaError_t error = cudaGetDeviceCount(&count);
        return std::make_pair(error == cudaSuccess ? count : 0,
                              std::string(error == cudaSuccess ? "" : cudaGetErrorString(error)));
      },
      "The number of GPUs that this process sees, and the error text if CUDA reports one, else an empty string.");

  m.def(
      "unreachable",
      [](const std::vector<int>& devices) {
        std::vector<std::pair<int, int>> pairs;
        jax_ring::gpu::Gpus& all = gpus();
        for (int device : devices) {
          for (int peer : devices) {
            if (!all.can_access(device, peer)) pairs.emplace_back(device, peer);
          }
        }
        return pairs;
      },
      "devices"_a,
      "The pairs (device, peer) of these GPUs of this process in which the device cannot access the peer's memory.");

  m.def(
      "identities",
      [] {
        std::vector<std::pair<std::string, std::string>> all;
        for (const jax_ring::gpu::Identity& each : gpus().identities()) all.emplace_back(each.bus_id, each.uuid);
        return all;
      },
      "(PCI bus id, UUID in hexadecimal digits) of each GPU that this process sees, by CUDA ordinal. Creates no "
      "context.");
}
