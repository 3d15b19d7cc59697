// xla_error.h: the runtime's error for a failure.
#pragma once

#include <string>
#include <utility>

#include "base/call_failure.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

inline xla::ffi::Error error_of(const CallFailure& failure) {
  static_assert(static_cast<int>(xla::ffi::ErrorCode::kDeadlineExceeded) ==
                    static_cast<int>(ErrorCode::deadline_exceeded) &&
                static_cast<int>(xla::ffi::ErrorCode::kInternal) == static_cast<int>(ErrorCode::internal));
  return xla::ffi::Error(static_cast<xla::ffi::ErrorCode>(failure.code), failure.message());
}

// An error without further details.
inline xla::ffi::Error new_error(ErrorCode code, std::string text) {
  return error_of(*numbered(CallFailure::of(CallFailure::Kind::other, std::move(text), code)));
}

}  // namespace jax_ring
