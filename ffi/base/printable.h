// printable.h: text of another process, without anything that a terminal obeys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace jax_ring {

// The bytes of the UTF-8 character at the beginning; 0 if there is none, or one that is not shown as itself: a control
// character, or one that breaks the line or turns its direction.
inline size_t shown_character(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const size_t size = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < size) return 0;
  uint32_t point = byte(0) & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    point = point << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0xa0, 0x800, 0x10000};  // by size: no longer form of another character
  if (point < kSmallest[size - 2] || point > 0x10ffff) return 0;
  const bool is_surrogate = point >= 0xd800 && point <= 0xdfff;
  const bool breaks_or_turns = point == 0x61c || (point >= 0x200e && point <= 0x200f) ||
                               (point >= 0x2028 && point <= 0x202e) || (point >= 0x2066 && point <= 0x2069);
  return is_surrogate || breaks_or_turns ? 0 : size;
}

// The text as UTF-8, with \x1b for each byte that is not shown as itself.
inline std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t size = shown_character(text);
    if (size > 0) {
      shown += text.substr(0, size);
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<uint8_t>(text[0]));
      shown += escaped;
    }
    text.remove_prefix(size > 0 ? size : 1);
  }
  return shown;
}

}  // namespace jax_ring
