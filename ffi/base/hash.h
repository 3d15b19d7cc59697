// hash.h: a hash that is the same in all processes, unlike std::hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace jax_ring {

// FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/.
class Hash {
 public:
  Hash& add(std::string_view bytes) {
    for (char c : bytes) value_ = (value_ ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return *this;
  }
  template <class T>
  Hash& add(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>);
    return add(std::string_view(reinterpret_cast<const char*>(&value), sizeof(value)));
  }
  uint64_t value() const { return value_; }
  // Both halves, XORed.
  uint32_t value32() const { return static_cast<uint32_t>(value_ >> 32 ^ value_); }

 private:
  uint64_t value_ = 14695981039346656037u;
};

}  // namespace jax_ring
