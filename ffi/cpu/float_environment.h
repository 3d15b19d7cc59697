// float_environment.h: IEEE arithmetic while folding, whatever mode the calling thread is in.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ring::cpu {

// Some of the runtime's threads flush subnormal numbers to zero and others do not. A result must not depend on the
// thread that computed it, so flushing is off, and rounding is to nearest, for the lifetime of this object.
class IeeeFloatEnvironment {
 public:
#if defined(__x86_64__)
  IeeeFloatEnvironment() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero | kRounding));
  }
  ~IeeeFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZero = 1u << 15;
  static constexpr unsigned kDenormalsAreZero = 1u << 6;
  static constexpr unsigned kRounding = 3u << 13;
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(kFlushToZero | kRounding)));
  }
  ~IeeeFloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  static constexpr uint64_t kFlushToZero = 1ull << 24;
  static constexpr uint64_t kRounding = 3ull << 22;
  uint64_t saved_;
#else
#error "jax_ring: unknown processor; say here how it is told not to flush subnormal numbers"
#endif

 public:
  IeeeFloatEnvironment(const IeeeFloatEnvironment&) = delete;
  IeeeFloatEnvironment& operator=(const IeeeFloatEnvironment&) = delete;
};

}  // namespace jax_ring::cpu
