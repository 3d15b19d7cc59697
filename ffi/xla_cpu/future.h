// future.h: the runtime's future of a call, by XLA's C functions.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "attributes/xla_error.h"
#include "base/call_failure.h"
#include "base/threads.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// A call's later completion. xla::ffi::Future makes the runtime's future when the handler returns, and finds it from
// the promise by two more allocations and several atomic operations for each rank.
//
// The runtime frees a future that a handler has returned, once it is set. There is no other way to free one.
class Future {
 public:
  // Throws std::bad_alloc.
  static Future create(const XLA_FFI_Api* api) {
    XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
    if (XLA_FFI_Error* const error = api->XLA_FFI_Future_Create(&args)) {
      xla::ffi::internal::DestroyError(api, error);
      throw std::bad_alloc();
    }
    return {api, args.future};
  }

  // Completes the call, before or after the handler returns. failure: null if the result has been written. Call it
  // once.
  void set(const CallFailure* failure) const {
    if (failure != nullptr) return set_error(error_of(*failure));
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr, future_};
    check(api_->XLA_FFI_Future_SetAvailable(&args));
  }
  void set_error(const xla::ffi::Error& error) const {
    XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                      xla::ffi::internal::CreateError(api_, error)};
    check(api_->XLA_FFI_Future_SetError(&args));
  }

  XLA_FFI_Future* get() const { return future_; }

 private:
  Future(const XLA_FFI_Api* api, XLA_FFI_Future* future) : api_(api), future_(future) {}

  // The runtime refuses only a structure of another size, and then has refused the handler before.
  static void check(XLA_FFI_Error* error) {
    if (error == nullptr) return;
    std::fputs("jax_ring: the runtime refuses the completion of a call\n", stderr);
    std::abort();
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_Future* future_;
};

// A thread's future that was not needed, for its next call. When the thread ends, for another thread's.
class UnusedFuture {
 public:
  UnusedFuture() {
    std::lock_guard<Mutex> lock(left().mutex);
    if (left().futures.empty()) return;
    future_ = left().futures.back();
    left().futures.pop_back();
  }
  ~UnusedFuture() {
    if (!future_) return;
    std::lock_guard<Mutex> lock(left().mutex);
    left().futures.push_back(*future_);
  }

  Future take_or_create(const XLA_FFI_Api* api) {
    return future_ ? *std::exchange(future_, std::nullopt) : Future::create(api);
  }
  void keep(Future future) { future_ = future; }

 private:
  struct Left {
    Mutex mutex;
    std::vector<Future> futures;
  };
  static Left& left() {
    return immortal([] { return new Left; });
  }

  std::optional<Future> future_;
};

// What a handler returns: a future, or nothing if the call is done already. That saves the runtime the wait.
struct Result {
  XLA_FFI_Future* future = nullptr;
};

// The runtime's functions, as an argument of a handler.
struct Api {
  const XLA_FFI_Api* functions;
};

}  // namespace jax_ring::cpu

template <>
struct xla::ffi::CtxDecoding<jax_ring::cpu::Api> {
  using Type = jax_ring::cpu::Api;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* /*context*/,
                                    DiagnosticEngine& /*diagnostic*/) {
    return Type{api};
  }
};

template <xla::ffi::ExecutionStage stage>
struct xla::ffi::ResultEncoding<stage, jax_ring::cpu::Result> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(const XLA_FFI_Api* /*api*/,
                                                              XLA_FFI_ExecutionContext* /*context*/,
                                                              jax_ring::cpu::Result result) {
    if (result.future == nullptr) return static_cast<XLA_FFI_Error*>(nullptr);
    return result.future;
  }
};
