// futex.cc: a queue of sleepers for each word.
#include "model/checker/futex.h"

#include "model/checker/explorer.h"

namespace jax_ring::model {

void Explorer::futex_wait(const void* word, uint32_t seen) {
  bool sleeps = false;
  ordered(
      word, "begins to wait for a futex", [] { return true; },
      [&] {
        ThreadMemory& memory = threads_[current_]->memory;
        Futex& futex = futexes_[word];
        memory_.fence(memory, std::memory_order_seq_cst);
        memory.own.join(futex.given);
        memory.cause.join(futex.cause);
        const size_t location = memory_.location(word, sizeof(seen));
        const uint32_t first = memory.own.view.of(location);
        const uint32_t end = static_cast<uint32_t>(memory_.num_messages(location));
        const uint32_t message = first + choose(static_cast<int>(end - first));
        sleeps = memory_.read(memory, location, message, std::memory_order_relaxed) == seen;
        if (sleeps) futex.sleepers.push_back(current_);
      });
  if (!sleeps) return;
  const int self = current_;
  block("sleeps at a futex", [&] {
    for (int sleeper : futexes_[word].sleepers) {
      if (sleeper == self) return false;
    }
    return true;
  });
}

void Explorer::futex_wake(const void* word) {
  ordered(
      word, "wakes those that sleep at a futex", [] { return true; },
      [&] {
        ThreadMemory& memory = threads_[current_]->memory;
        Futex& futex = futexes_[word];
        memory_.fence(memory, std::memory_order_seq_cst);
        // A later wait sees everything before this wake, but no edge of happens-before is promised.
        futex.given.view.join(memory.own.view);
        futex.cause.join(memory.cause);
        futex.sleepers.clear();
      });
}

}  // namespace jax_ring::model
