// call_frame.cc: XLA's side of its FFI, as far as the engine's handlers use it.
#include "tests/standin/program/call_frame.h"

#include <stdexcept>
#include <vector>

#include "cuda/launch/handler.h"
#include "tests/standin/runtime/machine.h"
#include "tests/support/frame.h"

// Opaque to handlers.
struct XLA_FFI_ExecutionContext {
  const jax_ring::standin::Invocation* invocation;  // none at compile time
  void* state;
};

namespace jax_ring::standin {
namespace {

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
    XLA_FFI_Api api = testing::api_for_errors();
    api.XLA_FFI_Stream_Get = get_stream;
    api.XLA_FFI_RunId_Get = get_run_id;
    api.XLA_FFI_DeviceOrdinal_Get = get_device_ordinal;
    api.XLA_FFI_State_Set = set_state;
    api.XLA_FFI_State_Get = get_state;
    // XLA's action when the type is registered.
    gpu::instance_type_id()->type_id = 1;
    return api;
  }();
  return all;
}

std::vector<testing::FrameBuffer> buffers_of(const std::vector<DeviceBuffer>& buffers) {
  std::vector<testing::FrameBuffer> result;
  for (const DeviceBuffer& each : buffers) result.push_back({each.dtype, each.data, {each.count}});
  return result;
}

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

// The error's message, or an empty string.
std::string call(Handler handler, Stage stage, XLA_FFI_CallFrame* frame) {
  Machine& machine = Machine::instance();
  const int gpu_before = current_gpu();
  stage_of_thread = stage;
  XLA_FFI_Error* const error = handler(frame);
  stage_of_thread = Stage::none;
  if (current_gpu() != gpu_before) {
    machine.violate("a handler left the context of GPU " + std::to_string(current_gpu()) + " on a thread that had " +
                    (gpu_before < 0 ? "none" : "that of GPU " + std::to_string(gpu_before)));
    set_current_gpu(gpu_before);
  }
  if (const cudaError_t left = cudaGetLastError(); left != cudaSuccess) {
    machine.violate(std::string("a handler left ") + cudaGetErrorName(left) + " for XLA's next check of errors");
  }
  return testing::take_message(error);
}

}  // namespace

Instruction::Instruction(const Attributes& attributes) : attributes_(attributes) {
  XLA_FFI_ExecutionContext context{nullptr, nullptr};
  testing::Frame frame(api(), context, XLA_FFI_ExecutionStage_INSTANTIATE, attributes_);
  const std::string error = call(gpu::collective_instantiate, Stage::instantiate, frame.get());
  if (!error.empty()) throw std::runtime_error(error);
  state_ = context.state;
}

Instruction::~Instruction() { gpu::instance_type_info()->deleter(state_); }

std::string Instruction::initialize(const Invocation& invocation) {
  XLA_FFI_ExecutionContext context{&invocation, state_};
  testing::Frame frame(api(), context, XLA_FFI_ExecutionStage_INITIALIZE, attributes_, buffers_of(invocation.operands),
                       buffers_of(invocation.results));
  return call(gpu::collective_initialize, Stage::initialize, frame.get());
}

std::string Instruction::execute(const Invocation& invocation) {
  XLA_FFI_ExecutionContext context{&invocation, state_};
  testing::Frame frame(api(), context, XLA_FFI_ExecutionStage_EXECUTE, attributes_, buffers_of(invocation.operands),
                       buffers_of(invocation.results));
  return call(gpu::collective_execute, Stage::execute, frame.get());
}

}  // namespace jax_ring::standin
