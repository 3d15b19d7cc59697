// knowledge.h: what a thread of the model knows of the others: which of their events happened before its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace jax_ring::model {

constexpr int kMaxThreads = 16;

// The number of earlier events of each thread.
struct Clock {
  std::array<uint32_t, kMaxThreads> at{};

  void join(const Clock& other) {
    for (int i = 0; i < kMaxThreads; ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

// The oldest message of each location that may still be read. Locations are numbered in order of first use.
struct View {
  std::vector<uint32_t> at;

  uint32_t of(size_t location) const { return location < at.size() ? at[location] : 0; }
  void raise(size_t location, uint32_t message) {
    if (location >= at.size()) at.resize(location + 1);
    at[location] = std::max(at[location], message);
  }
  void join(const View& other) {
    if (other.at.size() > at.size()) at.resize(other.at.size());
    for (size_t i = 0; i < other.at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

// The knowledge that synchronization passes from one thread to another.
struct Knowledge {
  Clock happened;  // events that happened before, in the sense of C++
  View view;

  void join(const Knowledge& other) {
    happened.join(other.happened);
    view.join(other.view);
  }
};

using SharedKnowledge = std::shared_ptr<const Knowledge>;

// One value of a location, in modification order.
struct Message {
  uint64_t value;
  Clock cause;              // events that the store depends on, through reads of any order
  SharedKnowledge carried;  // knowledge gained by an acquire read of it; null: nothing
};

// The memory side of a thread.
struct ThreadMemory {
  Knowledge own;
  Clock cause;               // happened, plus what relaxed reads have seen without learning from it
  Knowledge unacquired;      // knowledge for an acquire fence, from earlier relaxed reads
  SharedKnowledge released;  // knowledge that the last release fence gives to later relaxed stores
};

}  // namespace jax_ring::model
