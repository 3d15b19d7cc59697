// kernels_of_dtype.cc: the kernels of one element type (JAX_RING_DTYPE), from the file that nvcc compiles.

// clang-format off: the order matters.
#include "tests/standin/runtime/device.h"
#include "cuda/kernels/kernels_dtype.cu"
// clang-format on
