// completion.h: the callback that completes a rank's call. Stored in place: no call allocates memory for it.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

#include "base/call_failure.h"

namespace jax_ring::cpu {

// Completes one rank's call; the failure is null if the result has been written. Like a move-only
// std::function<void(const CallFailure* failure)>, but with an in-place buffer large enough for the handler's callback.
class Completion {
 public:
  Completion() = default;

  template <class F, class = std::enable_if_t<!std::is_same_v<F, Completion>>>
  Completion(F callback) : operations_(&kOperations<F>) {
    static_assert(sizeof(F) <= kCapacity && alignof(F) <= alignof(void*), "it must fit in place");
    static_assert(std::is_nothrow_move_constructible_v<F>);
    new (storage_) F(std::move(callback));
  }

  Completion(Completion&& other) noexcept { move_from(other); }
  Completion& operator=(Completion&& other) noexcept {
    if (this != &other) {
      reset();
      move_from(other);
    }
    return *this;
  }
  ~Completion() { reset(); }

  explicit operator bool() const { return operations_ != nullptr; }
  void operator()(const CallFailure* failure) { operations_->invoke(storage_, failure); }

 private:
  static constexpr size_t kCapacity = 4 * sizeof(void*);

  struct Operations {
    void (*invoke)(void* at, const CallFailure* failure);
    void (*move)(void* from, void* to);  // and destroys the source
    void (*destroy)(void* at);
  };

  template <class F>
  static constexpr Operations kOperations = {
      [](void* at, const CallFailure* failure) { (*static_cast<F*>(at))(failure); },
      [](void* from, void* to) {
        new (to) F(std::move(*static_cast<F*>(from)));
        static_cast<F*>(from)->~F();
      },
      [](void* at) { static_cast<F*>(at)->~F(); },
  };

  void move_from(Completion& other) {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_ != nullptr) operations_->move(other.storage_, storage_);
  }
  void reset() {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->destroy(storage_);
  }

  const Operations* operations_ = nullptr;
  alignas(void*) unsigned char storage_[kCapacity];
};

}  // namespace jax_ring::cpu
