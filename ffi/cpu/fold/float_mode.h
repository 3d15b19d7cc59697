// float_mode.h: a thread's floating-point mode, so that results do not depend on the thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ring::cpu {

// The floating-point mode of the calling thread: rounding, and whether subnormal numbers are flushed to zero.
class FloatMode {
 public:
  static FloatMode current() {
#if defined(__x86_64__)
    return FloatMode(_mm_getcsr());
#elif defined(__aarch64__)
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return FloatMode(word);
#else
#error "jax_ring: unsupported processor: add how its floating-point control register is read and written"
#endif
  }

  // Round to nearest, flush nothing.
  static FloatMode ieee() {
#if defined(__x86_64__)
    constexpr uint64_t kFlushToZero = 1u << 15, kDenormalsAreZero = 1u << 6, kRounding = 3u << 13;
    return FloatMode(current().word_ & ~(kFlushToZero | kDenormalsAreZero | kRounding));
#else
    constexpr uint64_t kFlushToZero = 1u << 24, kRounding = 3u << 22;
    return FloatMode(current().word_ & ~(kFlushToZero | kRounding));
#endif
  }

  bool operator!=(const FloatMode& other) const { return word_ != other.word_; }

  void set() const {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(word_));
#else
    asm volatile("msr fpcr, %0" ::"r"(word_));
#endif
  }

 private:
  explicit FloatMode(uint64_t word) : word_(word) {}
  uint64_t word_;
};

// Sets the mode for a scope and restores it. Some of XLA's threads flush subnormal numbers, others do not; a result
// must not depend on that.
class ScopedFloatMode {
 public:
  explicit ScopedFloatMode(FloatMode mode) : saved_(FloatMode::current()), differs_(mode != saved_) {
    // Setting the mode waits for the instructions before it, so avoid it if nothing changes.
    if (differs_) mode.set();
  }
  ~ScopedFloatMode() {
    if (differs_) saved_.set();
  }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
  const FloatMode saved_;
  const bool differs_;
};

}  // namespace jax_ring::cpu
