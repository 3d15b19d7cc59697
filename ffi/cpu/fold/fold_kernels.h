// fold_kernels.h: folds p host buffers into p host buffers, with the widest instruction set of this CPU.
#pragma once

#include <cstddef>

#include "collective/fold.h"

namespace jax_ring::cpu {

// `count` buffers, each from element `begin` on.
template <class Buffer>
struct BufferSlices {
  const Buffer* buffers;
  int count;
  size_t begin;
};
using Outputs = BufferSlices<void*>;

struct Inputs : BufferSlices<const void*> {
  Inputs(const BufferSlices<const void*>& slices, const Subtree* tree = nullptr)
      : BufferSlices<const void*>(slices), subtrees(tree) {}
  Inputs(const void* const* buffers, int count, size_t begin, const Subtree* tree = nullptr)
      : BufferSlices<const void*>{buffers, count, begin}, subtrees(tree) {}

  const Subtree* subtrees;  // Tree::subtrees(), with one input per term; null: fold the inputs in sequence
};

// Folds `count` elements of the inputs, in the order of the inputs or along a tree, and writes the result to each
// output. An output may be the same memory as an input. With `streaming` the results are written with streaming stores
// if the CPU has them; the outputs must then be aligned to 64 bytes.
using FoldKernel = void (*)(const Inputs& inputs, const Outputs& outputs, size_t count, bool streaming);

// Unrounded sums of 16-bit floats. The sum of a single one is its value.
struct SumsInFloat32 {
  FoldKernel stored;   // of stored 16-bit floats
  FoldKernel rounded;  // of float32, each rounded to a 16-bit float first
};

struct FoldKernels {
  const char* instruction_set;
  FoldKernel kernels[static_cast<int>(Op::count)][static_cast<int>(DType::count)];
  FoldKernel decode;  // writes the float32 values of `count` packets of the only input
  SumsInFloat32 of_f16, of_bf16;

  FoldKernel get(Op op, DType dtype) const { return kernels[static_cast<int>(op)][static_cast<int>(dtype)]; }
};

// A fold with operands or results in another form than the type's elements.
struct Conversion {
  FoldKernel kernel = nullptr;  // null: no conversion
  size_t operand_bytes = 0;     // of an element
  size_t result_bytes = 0;
};

// The kernels for this machine, chosen once. JAX_RING_ISA (baseline, avx2, avx512) requests a smaller instruction set.
const FoldKernels& fold_kernels();

// Bytes of one element.
size_t element_size(DType dtype);

}  // namespace jax_ring::cpu
