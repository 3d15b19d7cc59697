// describe.h: how error messages name a call.
#pragma once

#include <string>
#include <string_view>

namespace jax_ring {

// call: what is called, the same on all ranks. lines: where in the user's program, or empty if that is unknown.
inline std::string describe(std::string_view call, std::string_view lines) {
  std::string text(call);
  if (!lines.empty()) text.append(", called at ").append(lines);
  return text;
}

}  // namespace jax_ring
