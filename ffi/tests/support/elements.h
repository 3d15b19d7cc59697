// elements.h: data of any dtype, and references written from the definitions of the formats.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cpu/fold/fold_kernels.h"

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

constexpr int kNumDTypes = static_cast<int>(DType::count);

const std::vector<DType>& all_dtypes();

inline std::string name_of(DType dtype) { return ::testing::PrintToString(dtype); }

inline std::string dtype_name(const ::testing::TestParamInfo<DType>& info) { return name_of(info.param); }

// ---- Small floats, from their definitions -------------------------------------------------------------------------

// The meaning of codes that are infinity, NaN and negative zero in IEEE 754.
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

const std::vector<Format>& small_formats();

// A format as the list of its values in double precision, where every value and every midpoint between two is exact.
// Rounding is then a search in the list, which shares no arithmetic with the code under test.
class SmallFloatReference {
 public:
  explicit SmallFloatReference(const Format& format);

  static const SmallFloatReference& of(DType dtype);

  uint32_t num_codes() const { return 2 * sign_; }
  uint32_t sign() const { return sign_; }        // the sign bit
  uint32_t largest() const { return largest_; }  // code of the largest finite number
  const Format& format() const { return format_; }

  bool is_nan(uint32_t code) const;
  double decode(uint32_t code) const;
  // A decoded value from a table, for loops over many elements.
  float decoded(uint32_t code) const { return decoded_[code]; }

  // The value of the code as if every code were finite; `code` may be one past the last one.
  double magnitude(uint32_t code) const { return magnitudes_[code]; }

  // The nearest code, ties to even; past the range, infinity or else NaN. A NaN keeps its sign if the format allows.
  uint32_t encode(float value) const;

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

bool is_small(DType dtype);

constexpr size_t kAlignment = 64;  // of the runtime's buffers

// Elements as bytes, so that buffers of every dtype have one type. A std::vector with an allocator of its own sets and
// copies byte by byte, and sanitizers check each byte.
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

uint64_t element_bits(DType dtype, const void* elements, size_t i);
void set_element(DType dtype, void* elements, size_t i, uint64_t bits);

// The element nearest to a number, as bits.
uint64_t element_of(DType dtype, double value);
bool is_nan_element(DType dtype, uint64_t bits);

// The number of bits of an element of this type.
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
uint64_t scalar_fold(DType dtype, const std::vector<uint64_t>& by_rank, Op op = Op::sum);
Bytes scalar_fold(DType dtype, const std::vector<const void*>& inputs, size_t count, Op op = Op::sum);

// Index of the first differing element, if any. All NaNs are equal: the payload and sign of a sum of two NaNs depend on
// the compiler's operand order.
std::optional<size_t> first_difference(DType dtype, const void* got, const void* want, size_t count);

// Every rank's elements. The kind of number depends on the index and is the same on all ranks, so that sums of
// subnormals stay subnormal and sums of negative zeros stay zero.
std::vector<Bytes> random_elements(DType dtype, int num_ranks, size_t count, unsigned seed);

}  // namespace jax_ring::cpu::testing
