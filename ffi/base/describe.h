// describe.h: how error messages name a call.
#pragma once

#include <string>
#include <string_view>

#include "base/printable.h"

namespace jax_ring {

// call: the call, the same on all ranks. lines: lines of the user's program; empty if unknown. Both are escaped: the
// program may be of somebody else.
inline std::string describe(std::string_view call, std::string_view lines) {
  std::string text(call);
  if (!lines.empty()) text.append(", called at ").append(lines);
  return printable(text);
}

}  // namespace jax_ring
