// waiting_rank.cc: the states of a rank that waits.
#include "cpu/waiting_rank.h"

#include "common/polling.h"

namespace jax_ring::cpu {

bool WaitingRank::wait() {
  State seen = state_.load(std::memory_order_acquire);
  if (seen == State::skipped) return false;
  for (;;) {
    const bool has_changed = poll(kWaitTime, has_own_core_, [&] {
      seen = state_.load(std::memory_order_acquire);
      return seen == State::released || seen == State::offered;
    });
    if (seen == State::released) {
      share_ = nullptr;  // offered, but done by others
      return true;
    }
    // Where a state has changed meanwhile, the next turn finds out.
    if (!state_.compare_exchange_strong(seen, has_changed ? State::working : State::left, std::memory_order_acq_rel)) {
      continue;
    }
    if (!has_changed) return false;
    std::exchange(share_, nullptr)();
  }
}

bool WaitingRank::offer(std::function<void()> share) {
  State seen = state_.load(std::memory_order_relaxed);
  if (seen != State::waiting) return false;
  share_ = std::move(share);
  return state_.compare_exchange_strong(seen, State::offered, std::memory_order_acq_rel);
}

}  // namespace jax_ring::cpu
