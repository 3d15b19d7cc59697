// switch_adds.h: the element types that an NVSwitch can add.
#pragma once

#include <type_traits>

#include "collective/fold.h"

namespace jax_ring {

// Whether the switch can add this type. 16-bit floats are added in float32, and rounded once.
template <class Element>
constexpr bool kSwitchAdds = std::is_same_v<Element, Float16> || std::is_same_v<Element, BFloat16> ||
                             std::is_same_v<Element, Native<float>> || std::is_same_v<Element, Native<double>> ||
                             std::is_same_v<Element, Native<uint32_t>> || std::is_same_v<Element, Native<uint64_t>>;

inline bool switch_adds(DType dtype) {
  switch (dtype) {
#define JAX_RING_CASE(name, element) \
  case DType::name:                  \
    return kSwitchAdds<element>;
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_CASE)
#undef JAX_RING_CASE
    case DType::count:
      break;
  }
  return false;
}

}  // namespace jax_ring
