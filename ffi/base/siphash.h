// siphash.h: SipHash-2-4, a hash whose values say nothing of each other without its key: https://131002.net/siphash/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace jax_ring {

class SipHash {
 public:
  static constexpr size_t kKeyBytes = 16;

  // Throws std::invalid_argument unless the key has kKeyBytes.
  explicit SipHash(std::string_view key) {
    if (key.size() != kKeyBytes) {
      throw std::invalid_argument("a key has " + std::to_string(kKeyBytes) + " bytes, and not " +
                                  std::to_string(key.size()));
    }
    key_ = {word(key.data(), 8), word(key.data() + 8, 8)};
  }

  uint64_t operator()(std::string_view bytes) const {
    State v = {key_[0] ^ 0x736f6d6570736575, key_[1] ^ 0x646f72616e646f6d, key_[0] ^ 0x6c7967656e657261,
               key_[1] ^ 0x7465646279746573};
    const auto mix = [&v](uint64_t block) {
      v[3] ^= block;
      rounds(v, 2);
      v[0] ^= block;
    };
    size_t at = 0;
    for (; at + 8 <= bytes.size(); at += 8) mix(word(bytes.data() + at, 8));
    mix(uint64_t{bytes.size()} << 56 | word(bytes.data() + at, bytes.size() - at));
    v[2] ^= 0xff;
    rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
  }

 private:
  using State = std::array<uint64_t, 4>;

  // Little-endian, of at most 8 bytes.
  static uint64_t word(const char* bytes, size_t size) {
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{static_cast<unsigned char>(bytes[i])} << 8 * i;
    return value;
  }
  static uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }
  static void rounds(State& v, int count) {
    for (; count > 0; --count) {
      v[0] += v[1], v[1] = rotated(v[1], 13) ^ v[0], v[0] = rotated(v[0], 32);
      v[2] += v[3], v[3] = rotated(v[3], 16) ^ v[2];
      v[0] += v[3], v[3] = rotated(v[3], 21) ^ v[0];
      v[2] += v[1], v[1] = rotated(v[1], 17) ^ v[2], v[2] = rotated(v[2], 32);
    }
  }

  std::array<uint64_t, 2> key_;
};

}  // namespace jax_ring
