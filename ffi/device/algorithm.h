// algorithm.h: runs one team's share of a collective, with any algorithm.
#pragma once

#include <type_traits>

#include "device/fold/kernel_fold.h"
#include "device/multicast.h"
#include "device/one_shot.h"
#include "device/ring.h"
#include "device/two_shot.h"

namespace jax_ring {

// Fills only this team's part of a failed call's results: other teams may have succeeded. All bits are ones, which is
// NaN in nearly every float type and cannot be mistaken for a result.
template <class Team>
JAX_RING_TEAM_CALL void poison(const Endpoint& self, const Message& message, const Plan& plan, int cta, Team team) {
  const int p = self.num_ranks();
  const Pack ones{{~uint64_t{0}, ~uint64_t{0}}};
  if (requires_ring(plan)) {
    const uint64_t block = ceil_div(message.num_packs, p);
    const PackRange share = share_of({0, block}, cta, self.capacity.num_ctas);
    for (int i = 0; i < p; ++i) {
      fill(message, {i * block + share.begin, smaller(i * block + share.end, message.num_packs)}, 0, team, ones);
    }
    return;
  }
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  for (int block = 0; block < num_output_blocks(plan, p); ++block) {
    fill(message, share, block, team, ones);
  }
}

// Poisons the results along a tree: there, a reduce-scatter may have several.
template <class Team>
JAX_RING_TEAM_CALL void poison_results(const Endpoint& self, const Message& message, int num_results, int cta,
                                       Team team) {
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  for (int result = 0; result < num_results; ++result) {
    fill(message, share, result, team, Pack{{~uint64_t{0}, ~uint64_t{0}}});
  }
}

// The existing kernels. Maxima and minima do not depend on the order and have only two-shot kernels, which are never
// far from the best: there are many kernels, and they take long to compile.
template <class Element, class Op, Algorithm kAlgorithm>
constexpr bool is_needed =
    kHasKernels<Element, Op> &&
    (kAlgorithm == Algorithm::multicast ? std::is_same_v<Op, Sum> && kSwitchAdds<Element>
                                        : std::is_same_v<Op, Sum> || kAlgorithm == Algorithm::two_shot);

// Along a tree there are only sums. A ring cannot follow a tree: a partial sum would visit one rank after the other.
// Nor can a switch, which has an order of its own.
template <class Element, class Op, Algorithm kAlgorithm>
constexpr bool has_tree = is_needed<Element, Op, kAlgorithm> && std::is_same_v<Op, Sum> &&
                          (kAlgorithm == Algorithm::one_shot || kAlgorithm == Algorithm::two_shot);

// Whether a call hands more than its turn to the next one in its lane. One-shot does not, which saves it a fence.
template <Algorithm kAlgorithm>
constexpr bool kHasCounters = kAlgorithm != Algorithm::one_shot;

// Starts a call, and returns its Progress::turn: busy if it must not run, because this rank has failed before or
// another call has its lane.
template <Algorithm kAlgorithm, class Team>
JAX_RING_TEAM uint64_t start(const Endpoint& self, int cta, Team team) {
  uint64_t turn = 0;
  if (team.thread() == 0) {
    // Each takes a way to the memory and back. In this order the second need not wait for the first.
    const bool has_failed = SystemAtomic<uint32_t>(*self.failed).load(cuda::memory_order_relaxed) != 0;
    turn = take(&self.progress[cta].turn, kHasCounters<kAlgorithm>);
    if ((turn & Progress::kBusy) != 0) {
      fail(self, FailureKind::busy, Step::start, self.rank, 0, cta);
    } else if (has_failed) {
      // After a failure a rank no longer knows how far its peers are.
      give_back(&self.progress[cta].turn, static_cast<uint32_t>(turn));
      turn |= Progress::kBusy;
    }
  }
  return team.of_first(turn);
}

// Ends a call that has started. A call that never started leaves the lane to the running call. All threads have met at
// a barrier since they last used a mailbox or the counters: every algorithm ends with one, even if it fails.
template <Algorithm kAlgorithm, class Team>
JAX_RING_TEAM void finish(const Endpoint& self, int cta, Team team, uint32_t epoch) {
  if (team.thread() != 0) return;
  if constexpr (kHasCounters<kAlgorithm>) {
    give_back(&self.progress[cta].turn);
  } else {
    give_back(&self.progress[cta].turn, epoch);
  }
}

template <class Element, class Op, Algorithm kAlgorithm, class Team, class Terms = RankTerms>
JAX_RING_TEAM void run_team(const Endpoint& self, const Message& message, const Plan& plan, int cta, Team team,
                            const Terms& terms = {}) {
  const auto op = kernel_operation<Op>(message.flipped);
  const uint64_t turn = start<kAlgorithm>(self, cta, team);
  const bool started = (turn & Progress::kBusy) == 0;
  uint32_t epoch = static_cast<uint32_t>(turn);  // of one-shot
  bool ok = started;
  if constexpr (kAlgorithm == Algorithm::one_shot) {
    ok = ok && one_shot::all_reduce<Element>(self, message, cta, team, &epoch, op, terms);
  } else if constexpr (kAlgorithm == Algorithm::two_shot) {
    ok = ok && two_shot::run<Element>(self, message, plan, cta, team, op, terms);
  } else if constexpr (kAlgorithm == Algorithm::multicast) {
    ok = ok && multicast::all_reduce<Element>(self, message, cta, team);
  } else {
    ok = ok && ring::reduce<Element>(self, message, plan, cta, team, op);
  }
  if (started) finish<kAlgorithm>(self, cta, team, epoch);
  if (ok) return;
  if constexpr (Terms::kIsTree) {
    poison_results(self, message, terms.num_results(), cta, team);
  } else {
    poison(self, message, plan, cta, team);
  }
}

}  // namespace jax_ring
