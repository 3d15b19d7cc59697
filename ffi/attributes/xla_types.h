// xla_types.h: XLA's element types: their names, their sizes, and the engines' types for them.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "collective/collective.h"
#include "collective/fold.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// name: in JAX. bits: of an element; 0 of what is no array. XLA packs elements of fewer than 8 bits. dtype: of the
// fold; `count` if there is none. per_element: how many of the engine's elements are one, as a complex number is two
// reals.
struct XlaType {
  const char* name;
  size_t bits;
  DType dtype = DType::count;
  size_t per_element = 1;

  // Of an element; 0 if it is not alone in its bytes.
  size_t bytes() const { return bits / 8; }
};

// Without a name if a later version of XLA has added the type. xla::ffi::ByteWidth is undefined then, and counts a
// whole byte for each of several elements that share one.
inline XlaType xla_type_of(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::PRED:
      return {"bool", 8, DType::u8};
    case xla::ffi::U8:
      return {"uint8", 8, DType::u8};
    case xla::ffi::S8:
      return {"int8", 8, DType::s8};
    case xla::ffi::S16:
      return {"int16", 16, DType::s16};
    case xla::ffi::U16:
      return {"uint16", 16, DType::u16};
    case xla::ffi::S32:
      return {"int32", 32, DType::s32};
    case xla::ffi::U32:
      return {"uint32", 32, DType::u32};
    case xla::ffi::S64:
      return {"int64", 64, DType::s64};
    case xla::ffi::U64:
      return {"uint64", 64, DType::u64};
    case xla::ffi::F16:
      return {"float16", 16, DType::f16};
    case xla::ffi::BF16:
      return {"bfloat16", 16, DType::bf16};
    case xla::ffi::F32:
      return {"float32", 32, DType::f32};
    case xla::ffi::F64:
      return {"float64", 64, DType::f64};
    case xla::ffi::C64:
      return {"complex64", 64, DType::f32, 2};
    case xla::ffi::C128:
      return {"complex128", 128, DType::f64, 2};
    case xla::ffi::F8E5M2:
      return {"float8_e5m2", 8, DType::f8e5m2};
    case xla::ffi::F8E4M3:
      return {"float8_e4m3", 8, DType::f8e4m3};
    case xla::ffi::F8E3M4:
      return {"float8_e3m4", 8, DType::f8e3m4};
    case xla::ffi::F8E4M3FN:
      return {"float8_e4m3fn", 8, DType::f8e4m3fn};
    case xla::ffi::F8E4M3B11FNUZ:
      return {"float8_e4m3b11fnuz", 8, DType::f8e4m3b11fnuz};
    case xla::ffi::F8E4M3FNUZ:
      return {"float8_e4m3fnuz", 8, DType::f8e4m3fnuz};
    case xla::ffi::F8E5M2FNUZ:
      return {"float8_e5m2fnuz", 8, DType::f8e5m2fnuz};
    case xla::ffi::F8E8M0FNU:
      return {"float8_e8m0fnu", 8};
    case xla::ffi::F4E2M1FN:
      return {"float4_e2m1fn", 4};
    case xla::ffi::S4:
      return {"int4", 4};
    case xla::ffi::U4:
      return {"uint4", 4};
    case xla::ffi::S2:
      return {"int2", 2};
    case xla::ffi::U2:
      return {"uint2", 2};
    case xla::ffi::S1:
      return {"int1", 1};
    case xla::ffi::U1:
      return {"uint1", 1};
    case xla::ffi::DataType::TOKEN:
      return {"token", 0};
    default:
      return {"", 0};
  }
}

inline std::string name_of(xla::ffi::DataType type) {
  const std::string name = xla_type_of(type).name;
  return name.empty() ? "XLA's element type " + std::to_string(static_cast<int>(type)) : name;
}

// The engines' element type for an XLA element type. Data that is only moved is bytes.
struct EngineType {
  DType dtype;
  size_t per_xla_element;
};

inline EngineType engine_type_of(const Plan& plan, xla::ffi::DataType type) {
  const XlaType of_xla = xla_type_of(type);
  if (only_moves(plan)) return {DType::u8, of_xla.bytes()};
  if (of_xla.dtype == DType::count)
    throw std::invalid_argument("no engine adds or compares elements of " + name_of(type));
  return {of_xla.dtype, of_xla.per_element};
}

}  // namespace jax_ring
