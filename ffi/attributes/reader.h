// reader.h: reads the attributes of a custom call by their names. A program that another version of jax_ring has
// lowered may have others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// Throws std::invalid_argument.
class Reader {
 public:
  explicit Reader(xla::ffi::Dictionary all) : all_(all) {}

  template <class T>
  T read(std::string_view name) {
    ++num_read_;
    const xla::ffi::ErrorOr<T> value = all_.get<T>(name);
    if (value.has_value()) return *value;
    fail("the attribute '" + std::string(name) + "' is missing or has another type");
  }
  std::string_view text(std::string_view name) { return read<std::string_view>(name); }
  int64_t number(std::string_view name) { return read<int64_t>(name); }
  std::vector<int64_t> numbers(std::string_view name) {
    const auto span = read<xla::ffi::Span<const int64_t>>(name);
    return {span.begin(), span.end()};
  }

  // That all have been read.
  void expect_end() const {
    if (num_read_ == all_.size()) return;
    fail("there are " + std::to_string(all_.size()) + " attributes, not " + std::to_string(num_read_));
  }

 private:
  [[noreturn]] static void fail(const std::string& why) {
    throw std::invalid_argument(why +
                                ", so the program was exported or compiled with another version of jax_ring. Export or "
                                "compile it again with the version that runs it.");
  }

  const xla::ffi::Dictionary all_;
  size_t num_read_ = 0;
};

}  // namespace jax_ring
