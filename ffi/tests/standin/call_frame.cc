// call_frame.cc: XLA's side of its FFI, as far as the engine's handlers use it.
#include "standin/call_frame.h"

#include <deque>
#include <stdexcept>

#include "cuda/handler.h"
#include "standin/machine.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

// Opaque to handlers.
struct XLA_FFI_ExecutionContext {
  const jax_ring::standin::Invocation* invocation;  // none at compile time
  void* state;
};

namespace jax_ring::standin {
namespace {

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message, args->errc}; }
void get_message(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); }
void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* not_here() { return new XLA_FFI_Error{"not at compile time", XLA_FFI_Error_Code_FAILED_PRECONDITION}; }

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  if (args->ctx->invocation == nullptr) return not_here();
  args->stream = args->ctx->invocation->stream;
  return nullptr;
}

XLA_FFI_Error* get_run_id(XLA_FFI_RunId_Get_Args* args) {
  if (args->ctx->invocation == nullptr) return not_here();
  args->run_id = args->ctx->invocation->run_id;
  return nullptr;
}

XLA_FFI_Error* get_device_ordinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  if (args->ctx->invocation == nullptr) return not_here();
  args->device_ordinal = args->ctx->invocation->gpu;
  return nullptr;
}

XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* args) {
  args->ctx->state = args->state;
  return nullptr;
}

XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* args) {
  args->state = args->ctx->state;
  return args->state != nullptr ? nullptr : new XLA_FFI_Error{"no state", XLA_FFI_Error_Code_NOT_FOUND};
}

const XLA_FFI_Api& api() {
  static const XLA_FFI_Api all = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = create_error;
    api.XLA_FFI_Error_GetMessage = get_message;
    api.XLA_FFI_Error_Destroy = destroy_error;
    api.XLA_FFI_Stream_Get = get_stream;
    api.XLA_FFI_RunId_Get = get_run_id;
    api.XLA_FFI_DeviceOrdinal_Get = get_device_ordinal;
    api.XLA_FFI_State_Set = set_state;
    api.XLA_FFI_State_Get = get_state;
    // What XLA does when the type is registered.
    gpu::instance_type_id()->type_id = 1;
    return api;
  }();
  return all;
}

// A frame with everything that it points to.
class Frame {
 public:
  Frame(XLA_FFI_ExecutionStage stage, const Attributes& attributes, const Invocation* invocation, void* state)
      : context_{invocation, state} {
    frame_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame_.api = &api();
    frame_.ctx = &context_;
    frame_.stage = stage;
    for (const auto& [name, value] : attributes) add(name, value);
    frame_.attrs = {
        XLA_FFI_Attrs_STRUCT_SIZE, nullptr,       static_cast<int64_t>(names_.size()), attribute_types_.data(),
        name_pointers_.data(),     values_.data()};
    if (invocation != nullptr) {
      add(invocation->operands, arguments_);
      add(invocation->results, results_);
    }
    argument_types_.assign(arguments_.size(), XLA_FFI_ArgType_BUFFER);
    result_types_.assign(results_.size(), XLA_FFI_RetType_BUFFER);
    frame_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments_.size()), argument_types_.data(),
                   arguments_.data()};
    frame_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()), result_types_.data(),
                   results_.data()};
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // The error's message, or an empty string.
  std::string call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), Stage stage) {
    Machine& machine = Machine::instance();
    const int gpu_before = current_gpu();
    stage_of_thread = stage;
    XLA_FFI_Error* const error = handler(&frame_);
    stage_of_thread = Stage::none;
    if (current_gpu() != gpu_before) {
      machine.violate("a handler left the context of GPU " + std::to_string(current_gpu()) + " on a thread that had " +
                      (gpu_before < 0 ? "none" : "that of GPU " + std::to_string(gpu_before)));
      set_current_gpu(gpu_before);
    }
    if (const cudaError_t left = cudaGetLastError(); left != cudaSuccess) {
      machine.violate(std::string("a handler left ") + cudaGetErrorName(left) + " for XLA's next check of errors");
    }
    if (error == nullptr) return "";
    const std::string message = error->message;
    delete error;
    return message.empty() ? "an error without a message" : message;
  }
  void* state() const { return context_.state; }

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
    } else {
      const auto& numbers = std::get<std::vector<int64_t>>(value);
      arrays_.push_back({XLA_FFI_DataType_S64, numbers.size(), const_cast<int64_t*>(numbers.data())});
      attribute_types_.push_back(XLA_FFI_AttrType_ARRAY);
      values_.push_back(&arrays_.back());
    }
  }

  void add(const std::vector<DeviceBuffer>& buffers, std::vector<void*>& to) {
    for (const DeviceBuffer& each : buffers) {
      counts_.push_back(each.count);
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, each.dtype, each.data, 1, &counts_.back()});
      to.push_back(&buffers_.back());
    }
  }

  XLA_FFI_ExecutionContext context_;
  XLA_FFI_CallFrame frame_{};
  // Deques, whose elements stay where they are.
  std::deque<XLA_FFI_ByteSpan> names_, strings_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<int64_t> counts_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<XLA_FFI_AttrType> attribute_types_;
  std::vector<void*> values_, arguments_, results_;
  std::vector<XLA_FFI_ArgType> argument_types_;
  std::vector<XLA_FFI_RetType> result_types_;
};

}  // namespace

Instruction::Instruction(const Attributes& attributes) : attributes_(attributes) {
  Frame frame(XLA_FFI_ExecutionStage_INSTANTIATE, attributes_, nullptr, nullptr);
  const std::string error = frame.call(gpu::collective_instantiate, Stage::instantiate);
  if (!error.empty()) throw std::runtime_error(error);
  state_ = frame.state();
}

Instruction::~Instruction() { gpu::instance_type_info()->deleter(state_); }

std::string Instruction::initialize(const Invocation& invocation) {
  Frame frame(XLA_FFI_ExecutionStage_INITIALIZE, attributes_, &invocation, state_);
  return frame.call(gpu::collective_initialize, Stage::initialize);
}

std::string Instruction::execute(const Invocation& invocation) {
  Frame frame(XLA_FFI_ExecutionStage_EXECUTE, attributes_, &invocation, state_);
  return frame.call(gpu::collective_execute, Stage::execute);
}

}  // namespace jax_ring::standin
