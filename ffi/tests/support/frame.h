// frame.h: XLA's side of a call through its FFI: errors, and a complete call frame.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace jax_ring::testing {

// Numbers of 32 bits are of no attribute of jax_ring.
using Attribute = std::variant<int64_t, std::string, std::vector<int64_t>, std::vector<int32_t>>;
using Attributes = std::map<std::string, Attribute>;

// Attributes of a jax_ring call, a sum unless it is another collective, with all ranks in one group of process 0.
inline Attributes call_attributes(int num_ranks, const std::string& collective = "all_reduce") {
  std::vector<int64_t> members(num_ranks);
  std::iota(members.begin(), members.end(), 0);
  const std::vector<int64_t> none;
  return {{"call", "the call"},
          {"site", ""},
          {"collective", collective},
          {"op", "sum"},
          {"order", "rank"},
          {"root", int64_t{0}},
          {"sources", none},
          {"algorithm", "auto"},
          {"group_sizes", std::vector<int64_t>{num_ranks}},
          {"members", members},
          {"processes", std::vector<int64_t>(num_ranks, 0)},
          {"one_shot_bytes", none},
          {"two_shot_bytes", none},
          {"tree_shards", none},
          {"tree_sizes", none},
          {"tree_ranks", none},
          {"program", ""},
          {"part", none},
          {"rounds_to", ""},
          {"blocks_apart", int64_t{0}},
          {"lane", int64_t{0}}};
}

struct FrameBuffer {
  XLA_FFI_DataType dtype;
  void* data;
  std::vector<int64_t> dimensions;
};

// The part of XLA's functions that all tests need: errors.
inline XLA_FFI_Api api_for_errors() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->message, args->errc};
  };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = args->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  return api;
}

// The error's message, or an empty string if there is none. Destroys the error.
inline std::string take_message(XLA_FFI_Error* error) {
  if (error == nullptr) return "";
  const std::string message = std::move(error->message);
  delete error;
  return message.empty() ? "an error without a message" : message;
}

class Frame {
 public:
  // The attributes must outlive the frame.
  Frame(const XLA_FFI_Api& api, XLA_FFI_ExecutionContext& context, XLA_FFI_ExecutionStage stage,
        const Attributes& attributes, std::vector<FrameBuffer> operands = {}, std::vector<FrameBuffer> results = {})
      : operands_(std::move(operands)), results_(std::move(results)) {
    frame_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame_.api = &api;
    frame_.ctx = &context;
    frame_.stage = stage;
    for (const auto& [name, value] : attributes) add(name, value);
    frame_.attrs = {
        XLA_FFI_Attrs_STRUCT_SIZE, nullptr,       static_cast<int64_t>(names_.size()), attribute_types_.data(),
        name_pointers_.data(),     values_.data()};
    add(operands_, argument_pointers_);
    add(results_, result_pointers_);
    argument_types_.assign(operands_.size(), XLA_FFI_ArgType_BUFFER);
    result_types_.assign(results_.size(), XLA_FFI_RetType_BUFFER);
    frame_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()), argument_types_.data(),
                   argument_pointers_.data()};
    frame_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()), result_types_.data(),
                   result_pointers_.data()};
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  XLA_FFI_CallFrame* get() { return &frame_; }

 private:
  void add(const std::string& name, const Attribute& value) {
    names_.push_back({name.data(), name.size()});
    name_pointers_.push_back(&names_.back());
    if (const auto* number = std::get_if<int64_t>(&value)) {
      scalars_.push_back({XLA_FFI_DataType_S64, const_cast<int64_t*>(number)});
      attribute_types_.push_back(XLA_FFI_AttrType_SCALAR);
      values_.push_back(&scalars_.back());
    } else if (const auto* text = std::get_if<std::string>(&value)) {
      strings_.push_back({text->data(), text->size()});
      attribute_types_.push_back(XLA_FFI_AttrType_STRING);
      values_.push_back(&strings_.back());
    } else if (const auto* numbers = std::get_if<std::vector<int64_t>>(&value)) {
      add(XLA_FFI_DataType_S64, *numbers);
    } else {
      add(XLA_FFI_DataType_S32, std::get<std::vector<int32_t>>(value));
    }
  }

  template <class T>
  void add(XLA_FFI_DataType dtype, const std::vector<T>& numbers) {
    arrays_.push_back({dtype, numbers.size(), const_cast<T*>(numbers.data())});
    attribute_types_.push_back(XLA_FFI_AttrType_ARRAY);
    values_.push_back(&arrays_.back());
  }

  void add(std::vector<FrameBuffer>& buffers, std::vector<void*>& to) {
    for (FrameBuffer& each : buffers) {
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, each.dtype, each.data,
                          static_cast<int64_t>(each.dimensions.size()), each.dimensions.data()});
      to.push_back(&buffers_.back());
    }
  }

  XLA_FFI_CallFrame frame_{};
  std::vector<FrameBuffer> operands_, results_;
  // Deques: their elements stay in place.
  std::deque<XLA_FFI_ByteSpan> names_, strings_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<XLA_FFI_AttrType> attribute_types_;
  std::vector<void*> values_, argument_pointers_, result_pointers_;
  std::vector<XLA_FFI_ArgType> argument_types_;
  std::vector<XLA_FFI_RetType> result_types_;
};

}  // namespace jax_ring::testing
