// waiting_policy.h: where the ranks of a group wait in a call, and for how long.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "base/cores.h"
#include "base/threads.h"
#include "cpu/waiting/cores.h"
#include "cpu/waiting/wait_mode_tuner.h"
#include "cpu/waiting/waiting_rank.h"

namespace jax_ring::cpu {

// How ranks wait in a call.
struct Waiting {
  enum class Place { nowhere, own_thread, pool };
  Place place = Place::nowhere;
  std::chrono::nanoseconds limit{};
  bool spreads = false;  // over the cores
};

// The thread that makes a rank's call.
struct CallingThread {
  bool may_wait = true;       // no other rank needs it
  bool is_of_pool = false;    // known to belong to the runtime's pool
  bool may_use_pool = false;  // the pool has a thread for each rank
};

// One per group of a call instruction. Not thread-safe.
class WaitingPolicy {
 public:
  // num_ranks: of the group in this process. have_own_cores: whether no two of the call's ranks share a core.
  WaitingPolicy(int num_ranks, bool have_own_cores) : num_ranks_(num_ranks), have_own_cores_(have_own_cores) {}

  // How the ranks wait in the call that begins now. is_counted: whether the call counts as one of its execution; all
  // groups make the same calls.
  Waiting next(int64_t run_id, SteadyClock::time_point now, bool is_counted, bool may_use_pool);

  // How one arriving rank waits; empty if it does not.
  std::optional<WaitingRank::Terms> terms(const Waiting& waiting, const CallingThread& thread);

 private:
  // How often to spread ranks over the cores. If the system reunites ranks that were moved apart, it has a reason, such
  // as another process that needs a core. So they are moved ever more rarely, until they stay apart.
  static constexpr std::chrono::milliseconds kShortestSpreadInterval{2}, kLongestSpreadInterval{2048};

  bool spreads_now(SteadyClock::time_point now);

  int num_ranks_;
  bool have_own_cores_;
  int64_t run_id_ = -1;    // of the latest execution
  int64_t num_calls_ = 0;  // made by it
  WaitModeTuner tuner_;
  Spread spread_{usable_cores()};
  SteadyClock::time_point last_spread_;
  std::chrono::milliseconds spread_interval_ = kShortestSpreadInterval;
  int times_in_place_ = 0;  // checks that found all ranks spread, since the interval changed
};

}  // namespace jax_ring::cpu
