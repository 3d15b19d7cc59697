// instruction_sets.h: the instruction sets that this processor and its operating system support.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace jax_ring::cpu {

// The targets of the compiled fold kernels.
struct InstructionSets {
  bool avx2 = false;    // with F16C
  bool avx512 = false;  // F, BW, VL and DQ
};

// Not __builtin_cpu_supports: zig, which builds the wheels, does not implement it. Bits: Intel's Software Developer's
// Manual, CPUID in volume 2 and XCR0 in volume 1, section 13.3.
inline InstructionSets instruction_sets() {
  uint32_t eax, ebx, ecx, edx;
  const auto all_of = [](uint32_t word, auto... bits) { return (... && (word >> bits & 1)); };
  InstructionSets sets;
  if (!__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx)) return sets;
  constexpr int kOsxsave = 27, kAvx = 28, kF16c = 29;
  if (!all_of(ecx, kOsxsave, kAvx, kF16c)) return sets;
  uint32_t saved, high;  // XCR0: the registers that the operating system saves
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr int kXmm = 1, kYmm = 2, kOpmask = 5, kZmmLow = 6, kZmmHigh = 7;
  if (!all_of(saved, kXmm, kYmm) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return sets;
  constexpr int kAvx2 = 5, kAvx512f = 16, kAvx512dq = 17, kAvx512bw = 30, kAvx512vl = 31;
  sets.avx2 = all_of(ebx, kAvx2);
  sets.avx512 =
      sets.avx2 && all_of(ebx, kAvx512f, kAvx512dq, kAvx512bw, kAvx512vl) && all_of(saved, kOpmask, kZmmLow, kZmmHigh);
  return sets;
}

}  // namespace jax_ring::cpu
#endif
