// waiting_policy.cc: chooses by the results of earlier calls.
#include "cpu/waiting/waiting_policy.h"

#include <algorithm>

#include "cpu/waiting/executions.h"

namespace jax_ring::cpu {
namespace {

// For ranks of a call that its execution makes once.
constexpr std::chrono::microseconds kShortLimit(50);

// The factor by which the spreading interval changes, and the number of times in place before it gets shorter.
constexpr int kSpreadBackoff = 4, kTimesInPlace = 8;

}  // namespace

// The latest execution shows whether a call is made in a loop. If the pool brings no gain there, the ranks do not wait:
// one thread completes them in turn. That is faster, because no core waits for data from another one. With too few pool
// threads, only ranks that outnumber the cores do so.
Waiting WaitingPolicy::next(int64_t run_id, SteadyClock::time_point now, bool is_counted, bool may_use_pool) {
  Executions& executions = Executions::instance();
  if (is_counted) executions.count(run_id);
  const bool is_new = run_id != run_id_;
  const bool in_loop = !is_new || num_calls_ > 1;
  const bool is_one_of_many = in_loop || executions.num_calls(run_id) > 1 || executions.num_calls(run_id_) > 1;
  const bool ends_iteration = !is_new || num_calls_ == 1;
  if (is_new) num_calls_ = 0;
  ++num_calls_;
  run_id_ = run_id;
  if (may_use_pool && is_one_of_many && tuner_.next(now, ends_iteration)) {
    return {Waiting::Place::pool, tuner_.limit(), spreads_now(now)};
  }
  if (in_loop && (may_use_pool || !have_own_cores_)) return {};
  return {Waiting::Place::own_thread, kShortLimit, in_loop && spreads_now(now)};
}

bool WaitingPolicy::spreads_now(SteadyClock::time_point now) {
  if (!spread_.applies_to(num_ranks_) || now - last_spread_ < spread_interval_) return false;
  const bool has_moved_any = spread_.num_moved() > 0;
  // The pool takes all ranks, on the threads where they go on.
  if (has_moved_any) {
    last_spread_ = now;
    spread_interval_ = std::min(kSpreadBackoff * spread_interval_, kLongestSpreadInterval);
    times_in_place_ = 0;
  } else if (spread_.num_added() == num_ranks_) {
    last_spread_ = now;
    if (++times_in_place_ == kTimesInPlace) {
      times_in_place_ = 0;
      spread_interval_ = std::max(spread_interval_ / kSpreadBackoff, kShortestSpreadInterval);
    }
  }
  spread_.begin(num_ranks_);
  return true;
}

std::optional<WaitingRank::Terms> WaitingPolicy::terms(const Waiting& waiting, const CallingThread& thread) {
  if (waiting.place == Waiting::Place::nowhere) return std::nullopt;
  WaitingRank::Terms terms;
  terms.limit = waiting.limit;
  terms.spins = have_own_cores_;
  const bool on_pool = waiting.place == Waiting::Place::pool;
  if (!on_pool && !thread.may_wait) return std::nullopt;
  terms.moves = on_pool && !thread.is_of_pool;
  if (waiting.spreads && !terms.moves) terms.core = spread_.add(current_core());
  return terms;
}

}  // namespace jax_ring::cpu
