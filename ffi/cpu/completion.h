// completion.h: whom to tell that a call has ended: a callable kept in place, so that no call allocates memory for it.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace jax_ring::cpu {

// Tells a rank that its call has ended; the error is null when the result has been written. Like a move-only
// std::function<void(const std::string* error)>, whose own room is too small for what a rank needs to be told.
class Completion {
 public:
  Completion() = default;

  template <class F, class = std::enable_if_t<!std::is_same_v<F, Completion>>>
  Completion(F tell) : operations_(&kOperations<F>) {
    static_assert(sizeof(F) <= kCapacity && alignof(F) <= alignof(void*), "it must fit in place");
    static_assert(std::is_nothrow_move_constructible_v<F>);
    new (place_) F(std::move(tell));
  }

  Completion(Completion&& other) noexcept { take(other); }
  Completion& operator=(Completion&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Completion() { reset(); }

  explicit operator bool() const { return operations_ != nullptr; }
  void operator()(const std::string* error) { operations_->call(place_, error); }

 private:
  static constexpr size_t kCapacity = 4 * sizeof(void*);

  struct Operations {
    void (*call)(void* at, const std::string* error);
    void (*move)(void* from, void* to);  // and ends the one moved from
    void (*end)(void* at);
  };

  template <class F>
  static constexpr Operations kOperations = {
      [](void* at, const std::string* error) { (*static_cast<F*>(at))(error); },
      [](void* from, void* to) {
        new (to) F(std::move(*static_cast<F*>(from)));
        static_cast<F*>(from)->~F();
      },
      [](void* at) { static_cast<F*>(at)->~F(); },
  };

  void take(Completion& other) {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_ != nullptr) operations_->move(other.place_, place_);
  }
  void reset() {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->end(place_);
  }

  const Operations* operations_ = nullptr;
  alignas(void*) unsigned char place_[kCapacity];
};

}  // namespace jax_ring::cpu
