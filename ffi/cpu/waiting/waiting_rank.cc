// waiting_rank.cc: the states of a waiting rank.
#include "cpu/waiting/waiting_rank.h"

#include "base/polling.h"
#include "cpu/waiting/cores.h"

namespace jax_ring::cpu {
namespace {

constexpr std::chrono::microseconds kHeadStart(50);

}  // namespace

bool WaitingRank::wait() {
  State seen = state_.load(std::memory_order_acquire);
  if (seen == State::skipped) return false;
  if (seen == State::moving && state_.compare_exchange_strong(seen, State::waiting, std::memory_order_acq_rel)) {
    seen = State::waiting;
  }
  if (seen == State::movable && state_.compare_exchange_strong(seen, State::released, std::memory_order_acq_rel)) {
    return true;
  }
  if (seen == State::taken) return false;
  if (terms_.core) move_to_core(*terms_.core);
  for (;;) {
    const bool has_changed = poll(terms_.limit, terms_.spins, [&] {
      seen = state_.load(std::memory_order_acquire);
      return seen == State::released || seen == State::offered;
    });
    if (seen == State::released) {
      share_ = nullptr;  // offered, but others did it
      return true;
    }
    // If a state has changed meanwhile, the next iteration sees it.
    if (!state_.compare_exchange_strong(seen, has_changed ? State::working : State::left, std::memory_order_acq_rel)) {
      continue;
    }
    if (!has_changed) return false;
    std::exchange(share_, nullptr)();
  }
}

WaitingRank::Released WaitingRank::release() {
  State seen = State::moving;
  if (terms_.moves && state_.compare_exchange_strong(seen, State::movable, std::memory_order_acq_rel)) {
    return Released::moves;
  }
  return state_.exchange(State::released, std::memory_order_acq_rel) == State::left ? Released::has_left
                                                                                    : Released::goes_on;
}

bool WaitingRank::take_over() {
  // Give a pool thread a head start: it may have to wake, and this thread is awake.
  poll(kHeadStart, false, [&] { return state_.load(std::memory_order_relaxed) != State::movable; });
  // It may still be moving after an error: then nobody releases ranks.
  for (State seen : {State::movable, State::moving}) {
    if (state_.compare_exchange_strong(seen, State::taken, std::memory_order_acq_rel)) return true;
  }
  return state_.load(std::memory_order_acquire) != State::released;
}

bool WaitingRank::offer(std::function<void()> share) {
  State seen = state_.load(std::memory_order_relaxed);
  if (seen != State::waiting) return false;
  share_ = std::move(share);
  return state_.compare_exchange_strong(seen, State::offered, std::memory_order_acq_rel);
}

}  // namespace jax_ring::cpu
