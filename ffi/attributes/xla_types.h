// xla_types.h: maps XLA's element types and attribute strings to those of the engines.
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "collective/collective.h"
#include "collective/fold.h"
#include "collective/options.h"
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

// The enumerator whose name is `name`; `names` lists them in the order of the enumeration.
template <class Enum, size_t kCount>
Enum named(std::string_view name, const std::string_view (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("jax_ring: unknown attribute value " + std::string(name));
}

inline constexpr std::string_view kCollectives[] = {"all_reduce", "reduce_scatter", "all_gather", "reduce",
                                                    "broadcast",  "all_to_all",     "permute",    "ragged_all_to_all"};
inline constexpr std::string_view kOps[] = {"sum", "max", "min"};
inline constexpr std::string_view kOrders[] = {"rank", "ring", "any", "tree"};

// The attribute `sources`, see Plan::sources. Empty unless the collective is a permutation.
inline std::vector<int> sources_of(const Plan& plan, xla::ffi::Span<const int64_t> sources,
                                   xla::ffi::Span<const int64_t> group_sizes) {
  const bool permutes = plan.collective == Collective::permute;
  std::vector<bool> is_sent(sources.size());
  for (int64_t size : group_sizes) {
    if (sources.size() == (permutes ? static_cast<size_t>(size) : 0)) continue;
    throw std::invalid_argument("jax_ring: there are " + std::to_string(sources.size()) + " sources for a group of " +
                                std::to_string(size) + " ranks");
  }
  for (int64_t source : sources) {
    if (source == kNoRank) continue;
    const bool exists = source >= 0 && static_cast<size_t>(source) < sources.size();
    if (exists && !is_sent[source]) {
      is_sent[source] = true;
      continue;
    }
    throw std::invalid_argument("jax_ring: the source " + std::to_string(source) + " of a permutation of " +
                                std::to_string(sources.size()) + " ranks is no rank of it, or has two receivers");
  }
  return {sources.begin(), sources.end()};
}

// The requested algorithm; none if the engine chooses.
inline std::optional<Algorithm> algorithm_of(std::string_view name) {
  constexpr std::string_view kAlgorithms[] = {"one_shot", "two_shot", "ring"};
  if (name == "auto") return std::nullopt;
  return named<Algorithm>(name, kAlgorithms);
}

}  // namespace jax_ring
