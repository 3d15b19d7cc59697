// call_frame.h: calls the engine's handlers as XLA does, through the C frames of its FFI.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/frame.h"
#include "xla/ffi/api/c_api.h"

namespace jax_ring::standin {

using testing::Attributes;

struct DeviceBuffer {
  XLA_FFI_DataType dtype;
  void* data;
  int64_t count;
};

// One rank's side of an execution.
struct Invocation {
  int gpu;
  cudaStream_t stream;
  int64_t run_id;
  std::vector<DeviceBuffer> operands, results;
};

// One custom call of a program, shared by a process's executables. It also checks what the handlers leave behind on the
// thread: a record of a handled error, or another context, is a violation.
class Instruction {
 public:
  // Instantiates the handler. Throws std::runtime_error with its message if it fails.
  explicit Instruction(const Attributes& attributes);
  ~Instruction();
  Instruction(const Instruction&) = delete;
  Instruction& operator=(const Instruction&) = delete;

  // The message of the error, or an empty string.
  std::string initialize(const Invocation& invocation);
  std::string execute(const Invocation& invocation);

 private:
  void* state_ = nullptr;
  Attributes attributes_;
};

}  // namespace jax_ring::standin
