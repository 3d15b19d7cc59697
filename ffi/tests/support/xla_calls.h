// xla_calls.h: calls the CPU engine's handlers as XLA does: its functions, and a rank's execution of an instruction.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/frame.h"
#include "tests/support/support.h"
#include "tests/support/workers.h"
#include "xla_cpu/handler.h"

// Opaque to handlers.
struct XLA_FFI_ExecutionContext {
  int64_t run_id;
  void* state;
  jax_ring::cpu::Workers* workers;
};

struct XLA_FFI_Future {
  jax_ring::cpu::testing::Outcome outcome;
};

namespace jax_ring::cpu::testing {

using jax_ring::testing::Attributes;
using jax_ring::testing::Frame;
using jax_ring::testing::FrameBuffer;
using jax_ring::testing::take_message;

inline const XLA_FFI_Api& api() {
  static const XLA_FFI_Api all = [] {
    XLA_FFI_Api api = jax_ring::testing::api_for_errors();
    api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) {
      args->run_id = args->ctx->run_id;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) {
      args->ctx->state = args->state;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) {
      args->state = args->ctx->state;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
      *args->num_threads = args->ctx->workers->num_threads();
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
      args->ctx->workers->schedule([task = args->task, data = args->data] { task(data); });
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_Future_Create = [](XLA_FFI_Future_Create_Args* args) {
      args->future = new XLA_FFI_Future;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) {
      args->future->outcome.completion()(nullptr);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) {
      const std::string message = take_message(args->error);
      args->future->outcome.completion()(failure_with(message).get());
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    // XLA's action when the type is registered.
    call_site_type_id()->type_id = 1;
    return api;
  }();
  return all;
}

// XLA's pool. If its queue is full, it runs a task at once, on the scheduling thread.
class Pool final : public Workers {
 public:
  explicit Pool(bool is_full) : is_full_(is_full) {}
  int num_threads() const override { return threads_.num_threads(); }
  void schedule(std::function<void()> task) override {
    if (is_full_) return task();
    threads_.schedule(std::move(task));
  }

 private:
  const bool is_full_;
  Threads threads_;
};

// One rank's side of a call. Destroyed once it is done.
class Execution {
 public:
  Execution(void* state, const Attributes& attributes, uint32_t rank, int64_t run_id, std::vector<FrameBuffer> operands,
            std::vector<FrameBuffer> results, bool pool_is_full)
      : rank_(rank),
        context_{run_id, state, &pool_},
        frame_(api(), context_, XLA_FFI_ExecutionStage_EXECUTE, attributes, with_rank(std::move(operands)),
               std::move(results)),
        pool_(pool_is_full) {
    error_ = take_message(collective_execute(frame_.get()));
    future_.reset(frame_.get()->future);
  }

  // The error's message, or an empty string.
  std::string wait() const {
    if (future_ == nullptr || !error_.empty()) return error_;
    return future_->outcome.wait() ? future_->outcome.error() : "a rank was not completed";
  }

 private:
  std::vector<FrameBuffer> with_rank(std::vector<FrameBuffer> operands) {
    operands.insert(operands.begin(), {XLA_FFI_DataType_U32, &rank_, {}});
    return operands;
  }

  uint32_t rank_;
  XLA_FFI_ExecutionContext context_;
  Frame frame_;
  std::unique_ptr<XLA_FFI_Future> future_;
  std::string error_;
  Pool pool_;  // the first to be destroyed; waits for its threads
};

// One custom call of a program.
class Instruction {
 public:
  // Throws std::runtime_error with the handler's error.
  explicit Instruction(Attributes attributes) : attributes_(std::move(attributes)) {
    XLA_FFI_ExecutionContext context{0, nullptr, nullptr};
    Frame frame(api(), context, XLA_FFI_ExecutionStage_INSTANTIATE, attributes_);
    const std::string error = take_message(collective_instantiate(frame.get()));
    if (!error.empty()) throw std::runtime_error(error);
    state_ = context.state;
  }
  ~Instruction() { call_site_type_info()->deleter(state_); }
  Instruction(const Instruction&) = delete;
  Instruction& operator=(const Instruction&) = delete;

  std::unique_ptr<Execution> start(uint32_t rank, int64_t run_id, std::vector<FrameBuffer> operands,
                                   std::vector<FrameBuffer> results, bool pool_is_full = false) const {
    return std::make_unique<Execution>(state_, attributes_, rank, run_id, std::move(operands), std::move(results),
                                       pool_is_full);
  }
  // The error of a rank's call, or an empty string.
  std::string call(uint32_t rank, int64_t run_id, std::vector<FrameBuffer> operands, std::vector<FrameBuffer> results,
                   bool pool_is_full = false) const {
    return start(rank, run_id, std::move(operands), std::move(results), pool_is_full)->wait();
  }

 private:
  Attributes attributes_;
  void* state_ = nullptr;
};

// Runs body(rank) on a thread for each rank.
template <class Body>
void as_ranks(int num_ranks, Body body) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back([body, rank] { body(rank); });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace jax_ring::cpu::testing
