// xla_types.h: XLA's names of element types and options, decoded for the engines.
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ring/fold.h"
#include "ring/options.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// The engines' element type for XLA's, and how many of theirs one element of XLA's is.
struct Element {
  DType dtype;
  size_t per_element;
};

inline Element element_of(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::S8:
    case xla::ffi::U8:
      return {DType::u8, 1};
    case xla::ffi::S16:
    case xla::ffi::U16:
      return {DType::u16, 1};
    case xla::ffi::S32:
    case xla::ffi::U32:
      return {DType::u32, 1};
    case xla::ffi::S64:
    case xla::ffi::U64:
      return {DType::u64, 1};
    case xla::ffi::F16:
      return {DType::f16, 1};
    case xla::ffi::BF16:
      return {DType::bf16, 1};
    case xla::ffi::F32:
      return {DType::f32, 1};
    case xla::ffi::F64:
      return {DType::f64, 1};
    case xla::ffi::C64:
      return {DType::f32, 2};
    case xla::ffi::C128:
      return {DType::f64, 2};
    case xla::ffi::F8E5M2:
      return {DType::f8e5m2, 1};
    case xla::ffi::F8E4M3:
      return {DType::f8e4m3, 1};
    case xla::ffi::F8E3M4:
      return {DType::f8e3m4, 1};
    case xla::ffi::F8E4M3FN:
      return {DType::f8e4m3fn, 1};
    case xla::ffi::F8E4M3B11FNUZ:
      return {DType::f8e4m3b11fnuz, 1};
    case xla::ffi::F8E4M3FNUZ:
      return {DType::f8e4m3fnuz, 1};
    case xla::ffi::F8E5M2FNUZ:
      return {DType::f8e5m2fnuz, 1};
    default:
      throw std::invalid_argument("jax_ring_all_reduce: no fold for XLA element type " +
                                  std::to_string(static_cast<int>(dtype)));
  }
}

inline Order order_of(std::string_view name) {
  if (name == "rank") return Order::rank;
  if (name == "ring") return Order::ring;
  throw std::invalid_argument("jax_ring_all_reduce: unknown order " + std::string(name));
}

// The algorithm; none if the choice is left to us.
inline std::optional<Algorithm> algorithm_of(std::string_view name) {
  if (name == "auto") return std::nullopt;
  if (name == "one_shot") return Algorithm::one_shot;
  if (name == "two_shot") return Algorithm::two_shot;
  if (name == "ring") return Algorithm::ring;
  throw std::invalid_argument("jax_ring_all_reduce: unknown algorithm " + std::string(name));
}

}  // namespace jax_ring
