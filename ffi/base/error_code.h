// error_code.h: the code of a failure, which its text carries.
#pragma once

#include <string>
#include <string_view>

namespace jax_ring {

// What the runtime is told of a failure beside its text.
enum class ErrorCode { deadline_exceeded, resource_exhausted, failed_precondition };

// The text of a failure starts with the name of its code, unless that is deadline_exceeded. So the code also gets to
// other processes, which read each other's texts, and to every place that keeps one.
inline constexpr std::string_view kResourceExhausted = "RESOURCE_EXHAUSTED: ";
inline constexpr std::string_view kFailedPrecondition = "FAILED_PRECONDITION: ";

inline ErrorCode code_of(std::string_view text) {
  if (text.substr(0, kResourceExhausted.size()) == kResourceExhausted) return ErrorCode::resource_exhausted;
  if (text.substr(0, kFailedPrecondition.size()) == kFailedPrecondition) return ErrorCode::failed_precondition;
  return ErrorCode::deadline_exceeded;
}

// The name of the text's code as the text starts with it, maybe empty.
inline std::string_view code_name_of(std::string_view text) {
  switch (code_of(text)) {
    case ErrorCode::resource_exhausted:
      return kResourceExhausted;
    case ErrorCode::failed_precondition:
      return kFailedPrecondition;
    case ErrorCode::deadline_exceeded:
      break;
  }
  return "";
}

// The text without the name of its code.
inline std::string_view without_code(std::string_view text) { return text.substr(code_name_of(text).size()); }

}  // namespace jax_ring
