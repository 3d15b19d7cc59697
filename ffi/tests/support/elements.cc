// elements.cc: the formats' references, and folds of single elements. Compiled once, and optimized even under
// sanitizers: these loops take most of the time in tests of large messages.
#include "tests/support/elements.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>

namespace jax_ring::cpu::testing {

const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = [] {
    std::vector<DType> all;
    for (int i = 0; i < kNumDTypes; ++i) all.push_back(static_cast<DType>(i));
    return all;
  }();
  return dtypes;
}

const std::vector<Format>& small_formats() {
  static const std::vector<Format> formats = {
      {DType::f16, 5, 10, 15, Top::ieee},          {DType::bf16, 8, 7, 127, Top::ieee},
      {DType::f8e5m2, 5, 2, 15, Top::ieee},        {DType::f8e4m3, 4, 3, 7, Top::ieee},
      {DType::f8e3m4, 3, 4, 3, Top::ieee},         {DType::f8e4m3fn, 4, 3, 7, Top::fn},
      {DType::f8e4m3b11fnuz, 4, 3, 11, Top::fnuz}, {DType::f8e4m3fnuz, 4, 3, 8, Top::fnuz},
      {DType::f8e5m2fnuz, 5, 2, 16, Top::fnuz},
  };
  return formats;
}

SmallFloatReference::SmallFloatReference(const Format& format)
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

const SmallFloatReference& SmallFloatReference::of(DType dtype) {
  static const std::vector<std::unique_ptr<SmallFloatReference>> references = [] {
    std::vector<std::unique_ptr<SmallFloatReference>> by_dtype(kNumDTypes);
    for (const Format& format : small_formats()) {
      by_dtype[static_cast<int>(format.dtype)] = std::make_unique<SmallFloatReference>(format);
    }
    return by_dtype;
  }();
  return *references[static_cast<int>(dtype)];
}

bool SmallFloatReference::is_nan(uint32_t code) const {
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

double SmallFloatReference::decode(uint32_t code) const {
  const uint32_t magnitude = code & (sign_ - 1);
  double value = magnitudes_[magnitude];
  if (format_.top == Top::ieee && magnitude == infinity_) value = std::numeric_limits<double>::infinity();
  if (is_nan(code)) value = std::numeric_limits<double>::quiet_NaN();
  return std::copysign(value, code & sign_ ? -1.0 : 1.0);
}

uint32_t SmallFloatReference::encode(float value) const {
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

bool is_small(DType dtype) {
  return std::any_of(small_formats().begin(), small_formats().end(),
                     [&](const Format& format) { return format.dtype == dtype; });
}

// The tests, like the library, run on little-endian machines. Constant sizes: a memcpy call per element takes longer
// than everything else, most of all under a sanitizer.
uint64_t element_bits(DType dtype, const void* elements, size_t i) {
  const size_t size = element_size(dtype);
  const auto* const at = static_cast<const unsigned char*>(elements) + i * size;
  uint64_t bits = 0;
  switch (size) {
    case 1:
      return *at;
    case 2:
      std::memcpy(&bits, at, 2);
      break;
    case 4:
      std::memcpy(&bits, at, 4);
      break;
    default:
      std::memcpy(&bits, at, 8);
  }
  return bits;
}

void set_element(DType dtype, void* elements, size_t i, uint64_t bits) {
  const size_t size = element_size(dtype);
  auto* const at = static_cast<unsigned char*>(elements) + i * size;
  switch (size) {
    case 1:
      *at = static_cast<unsigned char>(bits);
      break;
    case 2:
      std::memcpy(at, &bits, 2);
      break;
    case 4:
      std::memcpy(at, &bits, 4);
      break;
    default:
      std::memcpy(at, &bits, 8);
  }
}

uint64_t element_of(DType dtype, double value) {
  if (dtype == DType::f64) return bit_cast<uint64_t>(value);
  if (dtype == DType::f32) return bit_cast<uint32_t>(static_cast<float>(value));
  if (is_small(dtype)) return SmallFloatReference::of(dtype).encode(static_cast<float>(value));
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}

bool is_nan_element(DType dtype, uint64_t bits) {
  if (dtype == DType::f64) return std::isnan(bit_cast<double>(bits));
  if (dtype == DType::f32) return std::isnan(bit_cast<float>(static_cast<uint32_t>(bits)));
  return is_small(dtype) && SmallFloatReference::of(dtype).is_nan(static_cast<uint32_t>(bits));
}

uint64_t scalar_fold(DType dtype, const std::vector<uint64_t>& by_rank, Op op) {
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

Bytes scalar_fold(DType dtype, const std::vector<const void*>& inputs, size_t count, Op op) {
  Bytes result(count * element_size(dtype));
  std::vector<uint64_t> by_rank(inputs.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) by_rank[rank] = element_bits(dtype, inputs[rank], i);
    set_element(dtype, result.data(), i, scalar_fold(dtype, by_rank, op));
  }
  return result;
}

std::optional<size_t> first_difference(DType dtype, const void* got, const void* want, size_t count) {
  if (count == 0 || std::memcmp(got, want, count * element_size(dtype)) == 0) return std::nullopt;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t a = element_bits(dtype, got, i), b = element_bits(dtype, want, i);
    if (a != b && !(is_nan_element(dtype, a) && is_nan_element(dtype, b))) return i;
  }
  return std::nullopt;
}

std::vector<Bytes> random_elements(DType dtype, int num_ranks, size_t count, unsigned seed) {
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

}  // namespace jax_ring::cpu::testing
