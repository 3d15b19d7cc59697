// atomic.h: the operations of std::atomic on the model's memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

#include "model/checker/checker.h"

namespace jax_ring::model {

// The atomic at an address.
template <class T>
class AtomicAt {
  static_assert(sizeof(T) <= 8);

 public:
  using Order = std::memory_order;

  explicit AtomicAt(T* at) : at_(at) {}

  T load(Order order = std::memory_order_seq_cst) const { return from_bits(model::load(at_, sizeof(T), order)); }
  void store(T value, Order order = std::memory_order_seq_cst) const {
    model::store(at_, sizeof(T), to_bits(value), order);
  }
  T exchange(T value, Order order = std::memory_order_seq_cst) const {
    return change(order, [value](T) { return value; });
  }
  T fetch_add(T value, Order order = std::memory_order_seq_cst) const {
    return change(order, [value](T old) { return static_cast<T>(old + value); });
  }
  T fetch_sub(T value, Order order = std::memory_order_seq_cst) const {
    return change(order, [value](T old) { return static_cast<T>(old - value); });
  }
  T fetch_or(T value, Order order = std::memory_order_seq_cst) const {
    return change(order, [value](T old) { return static_cast<T>(old | value); });
  }
  T fetch_and(T value, Order order = std::memory_order_seq_cst) const {
    return change(order, [value](T old) { return static_cast<T>(old & value); });
  }
  bool compare_exchange_strong(T& expected, T value, Order order = std::memory_order_seq_cst) const {
    const T old = from_bits(model::modify(
        at_, sizeof(T),
        [&](uint64_t bits) {
          return from_bits(bits) == expected ? std::optional<uint64_t>(to_bits(value)) : std::nullopt;
        },
        order));
    const bool is_equal = old == expected;
    expected = old;
    return is_equal;
  }

 private:
  static uint64_t to_bits(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
  }
  static T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  template <class Change>
  T change(Order order, Change change) const {
    return from_bits(modify(at_, sizeof(T), [&](uint64_t bits) { return to_bits(change(from_bits(bits))); }, order));
  }

  T* at_;
};

// A standalone atomic.
template <class T>
class Atomic {
 public:
  using Order = std::memory_order;

  Atomic() = default;
  explicit Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(Order order = std::memory_order_seq_cst) const { return at().load(order); }
  void store(T value, Order order = std::memory_order_seq_cst) { at().store(value, order); }
  T exchange(T value, Order order = std::memory_order_seq_cst) { return at().exchange(value, order); }
  T fetch_add(T value, Order order = std::memory_order_seq_cst) { return at().fetch_add(value, order); }
  T fetch_sub(T value, Order order = std::memory_order_seq_cst) { return at().fetch_sub(value, order); }
  bool compare_exchange_strong(T& expected, T value, Order order = std::memory_order_seq_cst) {
    return at().compare_exchange_strong(expected, value, order);
  }

 private:
  AtomicAt<T> at() const { return AtomicAt<T>(const_cast<T*>(&value_)); }

  T value_{};
};

}  // namespace jax_ring::model
