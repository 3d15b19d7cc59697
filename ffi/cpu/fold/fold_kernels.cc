// fold_kernels.cc: picks the fold kernels for this CPU.
#include "cpu/fold/fold_kernels.h"

#include <cstdlib>
#include <string_view>

#include "cpu/fold/instruction_sets.h"

namespace jax_ring::cpu {

extern const FoldKernels fold_kernels_baseline;
#if defined(JAX_RING_HAS_avx2)
extern const FoldKernels fold_kernels_avx2;
#endif
#if defined(JAX_RING_HAS_avx512)
extern const FoldKernels fold_kernels_avx512;
#endif

namespace {

const FoldKernels& choose() {
#if defined(JAX_RING_HAS_avx2)
  // A smaller instruction set can be requested, for comparisons in tests and for debugging.
  const char* asked = std::getenv("JAX_RING_ISA");
  const std::string_view limit = asked != nullptr ? asked : "";
  const InstructionSets sets = instruction_sets();
#if defined(JAX_RING_HAS_avx512)
  if (sets.avx512 && limit != "baseline" && limit != "avx2") return fold_kernels_avx512;
#endif
  if (sets.avx2 && limit != "baseline") return fold_kernels_avx2;
#endif
  return fold_kernels_baseline;
}

}  // namespace

const FoldKernels& fold_kernels() {
  static const FoldKernels& chosen = choose();
  return chosen;
}

size_t element_size(DType dtype) {
  switch (dtype) {
#define JAX_RING_SIZE(name, element) \
  case DType::name:                  \
    return sizeof(element::Storage);
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_SIZE)
#undef JAX_RING_SIZE
    case DType::count:
      break;
  }
  return 0;
}

}  // namespace jax_ring::cpu
