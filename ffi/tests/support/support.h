// support.h: shared by the native tests: references written from the definitions of the formats, data, timed waits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "base/threads.h"
#include "cpu/fold/fold_kernels.h"
#include "cpu/rendezvous/rendezvous.h"
#include "cpu/rendezvous/watchdog.h"

namespace jax_ring {

// Parameter names in GoogleTest's output.
inline void PrintTo(DType dtype, std::ostream* out) {
#define JAX_RING_NAME(name, element) #name,
  static const char* const names[] = {JAX_RING_FOR_EACH_DTYPE(JAX_RING_NAME)};
#undef JAX_RING_NAME
  *out << names[static_cast<int>(dtype)];
}

}  // namespace jax_ring

namespace jax_ring::cpu::testing {

// No test waits longer than this: a hang is a failure, not a stalled build.
constexpr std::chrono::seconds kTestTimeout{20};

// Sanitizers cost a factor of about ten; loops that only add certainty are shorter under them.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSlowdown = 10;
#else
constexpr int kSlowdown = 1;
#endif

constexpr int kNumDTypes = static_cast<int>(DType::count);

inline const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = [] {
    std::vector<DType> all;
    for (int i = 0; i < kNumDTypes; ++i) all.push_back(static_cast<DType>(i));
    return all;
  }();
  return dtypes;
}

inline std::string name_of(DType dtype) { return ::testing::PrintToString(dtype); }

inline std::string dtype_name(const ::testing::TestParamInfo<DType>& info) { return name_of(info.param); }

// ---- Small floats, from their definitions -------------------------------------------------------------------------

// What a format does with the codes that are infinity, NaN and negative zero in IEEE 754.
enum class Top {
  ieee,  // all-ones exponent: infinity if the mantissa is zero, else NaN
  fn,    // only all ones is NaN; there is no infinity
  fnuz,  // only the code of negative zero is NaN; there is neither infinity nor negative zero
};

struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  int bias;
  Top top;
};

inline const std::vector<Format>& small_formats() {
  static const std::vector<Format> formats = {
      {DType::f16, 5, 10, 15, Top::ieee},          {DType::bf16, 8, 7, 127, Top::ieee},
      {DType::f8e5m2, 5, 2, 15, Top::ieee},        {DType::f8e4m3, 4, 3, 7, Top::ieee},
      {DType::f8e3m4, 3, 4, 3, Top::ieee},         {DType::f8e4m3fn, 4, 3, 7, Top::fn},
      {DType::f8e4m3b11fnuz, 4, 3, 11, Top::fnuz}, {DType::f8e4m3fnuz, 4, 3, 8, Top::fnuz},
      {DType::f8e5m2fnuz, 5, 2, 16, Top::fnuz},
  };
  return formats;
}

// A format as the list of its values in double precision, in which every value and every midpoint between two is exact.
// Rounding is then a search in the list, which shares no arithmetic with the code under test.
class SmallFloatReference {
 public:
  explicit SmallFloatReference(const Format& format)
      : format_(format), sign_(1u << (format.exponent_bits + format.mantissa_bits)) {
    const uint32_t per_binade = 1u << format.mantissa_bits;
    // One value past the last code: the midpoint below it is the threshold of overflow.
    for (uint32_t code = 0; code <= sign_; ++code) {
      const int exponent = static_cast<int>(code / per_binade);
      const double fraction = static_cast<double>(code % per_binade) / per_binade;
      magnitudes_.push_back(exponent == 0 ? std::ldexp(fraction, 1 - format.bias)
                                          : std::ldexp(1 + fraction, exponent - format.bias));
    }
    switch (format.top) {
      case Top::ieee:
        largest_ = sign_ - per_binade - 1;
        infinity_ = largest_ + 1;
        nan_ = infinity_ + per_binade / 2;
        break;
      case Top::fn:
        largest_ = sign_ - 2;
        nan_ = sign_ - 1;
        break;
      case Top::fnuz:
        largest_ = sign_ - 1;
        nan_ = sign_;
        break;
    }
    for (uint32_t code = 0; code < 2 * sign_; ++code) decoded_.push_back(static_cast<float>(decode(code)));
  }

  static const SmallFloatReference& of(DType dtype) {
    static const std::vector<std::unique_ptr<SmallFloatReference>> references = [] {
      std::vector<std::unique_ptr<SmallFloatReference>> by_dtype(kNumDTypes);
      for (const Format& format : small_formats()) {
        by_dtype[static_cast<int>(format.dtype)] = std::make_unique<SmallFloatReference>(format);
      }
      return by_dtype;
    }();
    return *references[static_cast<int>(dtype)];
  }

  uint32_t num_codes() const { return 2 * sign_; }
  uint32_t sign() const { return sign_; }        // the sign bit
  uint32_t largest() const { return largest_; }  // code of the largest finite number
  const Format& format() const { return format_; }

  bool is_nan(uint32_t code) const {
    const uint32_t magnitude = code & (sign_ - 1);
    switch (format_.top) {
      case Top::ieee:
        return magnitude > infinity_;
      case Top::fn:
        return magnitude == nan_;
      case Top::fnuz:
        return code == nan_;
    }
    return false;
  }

  double decode(uint32_t code) const {
    const uint32_t magnitude = code & (sign_ - 1);
    double value = magnitudes_[magnitude];
    if (format_.top == Top::ieee && magnitude == infinity_) value = std::numeric_limits<double>::infinity();
    if (is_nan(code)) value = std::numeric_limits<double>::quiet_NaN();
    return std::copysign(value, code & sign_ ? -1.0 : 1.0);
  }

  // The same from a table, for loops over many elements.
  float decoded(uint32_t code) const { return decoded_[code]; }

  // The value of the code as if every code were finite; `code` may be one past the last one.
  double magnitude(uint32_t code) const { return magnitudes_[code]; }

  // The nearest code, ties to even; past the range, infinity or else NaN. A NaN keeps its sign if the format allows.
  uint32_t encode(float value) const {
    const uint32_t sign = std::signbit(value) ? sign_ : 0;
    if (std::isnan(value)) return nan_ | sign;
    const double magnitude = std::fabs(static_cast<double>(value));
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    uint32_t code = static_cast<uint32_t>(above - magnitudes_.begin()) - 1;
    if (above != magnitudes_.end()) {
      const double midpoint = (magnitudes_[code] + *above) / 2;
      if (magnitude > midpoint || (magnitude == midpoint && code % 2 == 1)) ++code;
    }
    if (code > largest_) return format_.top == Top::ieee ? infinity_ | sign : nan_ | (nan_ == sign_ ? 0 : sign);
    if (code == 0 && format_.top == Top::fnuz) return 0;
    return code | sign;
  }

 private:
  Format format_;
  uint32_t sign_;
  uint32_t largest_ = 0;
  uint32_t infinity_ = 0;
  uint32_t nan_ = 0;
  std::vector<double> magnitudes_;
  std::vector<float> decoded_;
};

// ---- Elements of any dtype ----------------------------------------------------------------------------------------

inline bool is_small(DType dtype) {
  return std::any_of(small_formats().begin(), small_formats().end(),
                     [&](const Format& format) { return format.dtype == dtype; });
}

constexpr size_t kAlignment = 64;  // of the runtime's buffers

// Elements as bytes, so that buffers of every dtype have one type. Where a std::vector has an allocator of its own, it
// sets and copies byte by byte, and sanitizers check each of them.
class Bytes {
 public:
  explicit Bytes(size_t size = 0, unsigned char value = 0) : size_(size), data_(allocate(size)) {
    std::memset(data(), value, size);
  }
  Bytes(const unsigned char* begin, const unsigned char* end) : size_(end - begin), data_(allocate(size_)) {
    std::copy(begin, end, data());
  }
  Bytes(const Bytes& other) : Bytes(other.begin(), other.end()) {}
  Bytes(Bytes&& other) noexcept : size_(std::exchange(other.size_, 0)), data_(std::move(other.data_)) {}
  Bytes& operator=(Bytes other) noexcept {
    std::swap(size_, other.size_);
    std::swap(data_, other.data_);
    return *this;
  }

  size_t size() const { return size_; }
  unsigned char* data() { return data_.get(); }
  const unsigned char* data() const { return data_.get(); }
  unsigned char* begin() { return data(); }
  unsigned char* end() { return data() + size_; }
  const unsigned char* begin() const { return data(); }
  const unsigned char* end() const { return data() + size_; }
  unsigned char& operator[](size_t i) { return data()[i]; }
  const unsigned char& operator[](size_t i) const { return data()[i]; }

  void append(const Bytes& more) {
    Bytes both(size_ + more.size_);
    std::copy(more.begin(), more.end(), std::copy(begin(), end(), both.begin()));
    *this = std::move(both);
  }

  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0;
  }
  bool operator!=(const Bytes& other) const { return !(*this == other); }

 private:
  struct Deallocate {
    void operator()(unsigned char* p) const { ::operator delete(p, std::align_val_t(kAlignment)); }
  };
  using Data = std::unique_ptr<unsigned char, Deallocate>;

  static Data allocate(size_t size) {
    return Data(static_cast<unsigned char*>(::operator new(size, std::align_val_t(kAlignment))));
  }

  size_t size_;
  Data data_;
};

// A copy of `content` that starts `offset` bytes past an aligned address. The allocation ends with it, so that
// AddressSanitizer reports reads past the end.
class OffsetBuffer {
 public:
  OffsetBuffer(const Bytes& content, size_t offset) : bytes_(offset + content.size()), offset_(offset) {
    std::copy(content.begin(), content.end(), data());
  }
  unsigned char* data() { return bytes_.data() + offset_; }
  size_t size() const { return bytes_.size() - offset_; }

 private:
  Bytes bytes_;
  size_t offset_;
};

inline bool operator==(OffsetBuffer& a, OffsetBuffer& b) {
  return std::equal(a.data(), a.data() + a.size(), b.data(), b.data() + b.size());
}

inline uint64_t element_bits(DType dtype, const void* elements, size_t i) {
  uint64_t bits = 0;  // the tests, like the library, run on little-endian machines
  std::memcpy(&bits, static_cast<const unsigned char*>(elements) + i * element_size(dtype), element_size(dtype));
  return bits;
}

inline void set_element(DType dtype, void* elements, size_t i, uint64_t bits) {
  std::memcpy(static_cast<unsigned char*>(elements) + i * element_size(dtype), &bits, element_size(dtype));
}

// The element nearest to a number, as bits.
inline uint64_t element_of(DType dtype, double value) {
  if (dtype == DType::f64) return bit_cast<uint64_t>(value);
  if (dtype == DType::f32) return bit_cast<uint32_t>(static_cast<float>(value));
  if (is_small(dtype)) return SmallFloatReference::of(dtype).encode(static_cast<float>(value));
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}

inline bool is_nan_element(DType dtype, uint64_t bits) {
  if (dtype == DType::f64) return std::isnan(bit_cast<double>(bits));
  if (dtype == DType::f32) return std::isnan(bit_cast<float>(static_cast<uint32_t>(bits)));
  return is_small(dtype) && SmallFloatReference::of(dtype).is_nan(static_cast<uint32_t>(bits));
}

// The bits that an element of this type has.
inline uint64_t masked(DType dtype, uint64_t bits) {
  const int num_bits = static_cast<int>(8 * element_size(dtype));
  return num_bits == 64 ? bits : bits & ((uint64_t{1} << num_bits) - 1);
}

inline bool is_signed_integer(DType dtype) {
  return dtype == DType::s8 || dtype == DType::s16 || dtype == DType::s32 || dtype == DType::s64;
}

// One step of a fold of floats.
template <class T>
T scalar_step(Op op, T a, T b) {
  if (op == Op::sum) return a + b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool a_is_less = a < b || (a == b && std::signbit(a));
  return a_is_less == (op == Op::min) ? a : b;
}

// The definition of a fold, one element at a time: starting with the first value, in the accumulator type, rounded
// once.
inline uint64_t scalar_fold(DType dtype, const std::vector<uint64_t>& by_rank, Op op = Op::sum) {
  const auto fold = [&](auto value_of) {
    auto result = value_of(by_rank[0]);
    for (size_t rank = 1; rank < by_rank.size(); ++rank) result = scalar_step(op, result, value_of(by_rank[rank]));
    return result;
  };
  if (dtype == DType::f64) return bit_cast<uint64_t>(fold([](uint64_t bits) { return bit_cast<double>(bits); }));
  if (dtype == DType::f32) {
    return bit_cast<uint32_t>(fold([](uint64_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits)); }));
  }
  if (is_small(dtype)) {
    const SmallFloatReference& reference = SmallFloatReference::of(dtype);
    return reference.encode(fold([&](uint64_t bits) { return reference.decoded(static_cast<uint32_t>(bits)); }));
  }
  // With the sign bit shifted to the top and flipped, signed integers compare as unsigned ones do.
  const int shift = 64 - static_cast<int>(8 * element_size(dtype));
  const uint64_t flip = is_signed_integer(dtype) ? uint64_t{1} << 63 : 0;
  uint64_t result = by_rank[0];
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const uint64_t next = by_rank[rank];
    const bool is_less = ((next << shift) ^ flip) < ((result << shift) ^ flip);
    if (op == Op::sum) {
      result += next;
    } else if (is_less == (op == Op::min)) {
      result = next;
    }
  }
  return masked(dtype, result);
}

inline Bytes scalar_fold(DType dtype, const std::vector<const void*>& inputs, size_t count, Op op = Op::sum) {
  Bytes result(count * element_size(dtype));
  std::vector<uint64_t> by_rank(inputs.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) by_rank[rank] = element_bits(dtype, inputs[rank], i);
    set_element(dtype, result.data(), i, scalar_fold(dtype, by_rank, op));
  }
  return result;
}

// Index of the first element that differs, if any. All NaNs are equal: the payload and sign of a sum of two NaNs depend
// on the compiler's operand order.
inline std::optional<size_t> first_difference(DType dtype, const void* got, const void* want, size_t count) {
  if (count == 0 || std::memcmp(got, want, count * element_size(dtype)) == 0) return std::nullopt;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t a = element_bits(dtype, got, i), b = element_bits(dtype, want, i);
    if (a != b && !(is_nan_element(dtype, a) && is_nan_element(dtype, b))) return i;
  }
  return std::nullopt;
}

// Every rank's elements. The kind of number depends on the index and is the same on all ranks, so that sums of
// subnormals stay subnormal and sums of negative zeros stay zero.
inline std::vector<Bytes> random_elements(DType dtype, int num_ranks, size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 3);
  const double infinity = std::numeric_limits<double>::infinity();
  const double specials[] = {infinity, -infinity, std::numeric_limits<double>::quiet_NaN(), -0.0, 0.0, 1, -1};
  const int sign_bit = static_cast<int>(8 * element_size(dtype)) - 1;
  const uint64_t negative_zero = uint64_t{1} << sign_bit;
  const bool is_float = is_small(dtype) || dtype == DType::f32 || dtype == DType::f64;
  std::vector<Bytes> elements(num_ranks, Bytes(count * element_size(dtype)));
  for (size_t i = 0; i < count; ++i) {
    const uint64_t kind = is_float ? random() % 8 : 0;
    for (Bytes& of_rank : elements) {
      uint64_t bits = random();
      if (kind == 1) bits = (random() & negative_zero) | (random() % 8);  // the smallest subnormals
      if (kind == 2) bits = negative_zero;
      if (kind == 3) bits = element_of(dtype, specials[random() % std::size(specials)]);
      if (kind >= 4) bits = element_of(dtype, normal(random));
      set_element(dtype, of_rank.data(), i, bits);
    }
  }
  return elements;
}

// ---- Calls and waits ----------------------------------------------------------------------------------------------

// A run id that no other test of the process has used: the watchdog remembers failed ones.
inline int64_t next_run_id() {
  static std::atomic<int64_t> next{1};
  return next.fetch_add(1);
}

// A failure with this text.
inline CallFailurePtr failure_with(std::string text) {
  return numbered(CallFailure::of(CallFailure::Kind::other, std::move(text)));
}

// What one participant's completion received. The completion keeps the state alive, so that a late second call is
// harmless, but counted.
class Outcome {
 public:
  Outcome() = default;
  Outcome(Outcome&&) = default;

  std::function<void(const CallFailure* failure)> completion() const {
    return [state = state_](const CallFailure* failure) {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (state->times++ == 0 && failure != nullptr) state->failure = *failure;
      state->changed.notify_all();
    };
  }

  // Whether the completion runs in time.
  bool wait(std::chrono::duration<double> timeout = kTestTimeout) const {
    std::unique_lock<std::mutex> lock(state_->mutex);
    return state_->changed.wait_for(lock, timeout, [&] { return state_->times > 0; });
  }

  int times() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->times;
  }

  // Empty when the call succeeded.
  std::string error() const { return failure().text; }
  CallFailure failure() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->failure;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int times = 0;
    CallFailure failure;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Sets the deadline for a scope.
class ScopedDeadline {
 public:
  explicit ScopedDeadline(double seconds) : before_(Watchdog::instance().deadline()) {
    Watchdog::instance().set_deadline(seconds);
  }
  ~ScopedDeadline() { Watchdog::instance().set_deadline(before_); }
  ScopedDeadline(const ScopedDeadline&) = delete;
  ScopedDeadline& operator=(const ScopedDeadline&) = delete;

 private:
  double before_;
};

// Lets the next starts of a thread fail, as at a limit of the system.
class FailingThreadStarts {
 public:
  explicit FailingThreadStarts(int count) { failing_thread_starts = count; }
  ~FailingThreadStarts() { failing_thread_starts = 0; }
  FailingThreadStarts(const FailingThreadStarts&) = delete;
  FailingThreadStarts& operator=(const FailingThreadStarts&) = delete;
};

}  // namespace jax_ring::cpu::testing
