// driver.h: finds functions of the CUDA driver at run time, so that nothing links to it.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace jax_ring::gpu {

// Finds a driver function in its form for the given version of CUDA: 12010 is 12.1. Throws std::runtime_error if the
// driver has none.
template <class Function>
void find_driver_function(const char* name, unsigned version, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#else
  // In its form for the toolkit's version, which is not older.
  static_cast<void>(version);
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // the text below reports the error, and XLA's next check must not
    throw std::runtime_error(std::string("the CUDA driver has no ") + name + ". Install a newer one.");
  }
  *function = reinterpret_cast<Function>(found);
}

}  // namespace jax_ring::gpu
