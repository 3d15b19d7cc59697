// xla_types.h: maps XLA's element types to the engines'.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "collective/collective.h"
#include "collective/fold.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// The engines' element type for an XLA element type. A complex number is two reals; data that is only moved is bytes.
struct EngineType {
  DType dtype;
  size_t per_xla_element;
};

inline EngineType engine_type_of(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::PRED:
    case xla::ffi::U8:
      return {DType::u8, 1};
    case xla::ffi::S8:
      return {DType::s8, 1};
    case xla::ffi::S16:
      return {DType::s16, 1};
    case xla::ffi::U16:
      return {DType::u16, 1};
    case xla::ffi::S32:
      return {DType::s32, 1};
    case xla::ffi::U32:
      return {DType::u32, 1};
    case xla::ffi::S64:
      return {DType::s64, 1};
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
      throw std::invalid_argument("jax_ring: no fold for XLA element type " + std::to_string(static_cast<int>(dtype)));
  }
}

inline EngineType engine_type_of(const Plan& plan, xla::ffi::DataType dtype) {
  return only_moves(plan) ? EngineType{DType::u8, xla::ffi::ByteWidth(dtype)} : engine_type_of(dtype);
}

}  // namespace jax_ring
