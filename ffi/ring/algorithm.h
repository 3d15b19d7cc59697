// algorithm.h: the part of one team in an all-reduce, by any algorithm.
#pragma once

#include "ring/one_shot.h"
#include "ring/ring.h"
#include "ring/two_shot.h"

namespace jax_ring {

template <class Element, class Op, Algorithm kAlgorithm, class Team>
JAX_RING_TEAM void all_reduce(const Endpoint& self, const Message& message, Order order, int cta, Team team, Op op) {
  // A rank that has failed once no longer knows how far the others are.
  bool ok = team.all(SystemAtomic<uint32_t>(*self.failed).load(cuda::memory_order_relaxed) == 0);
  if constexpr (kAlgorithm == Algorithm::one_shot) {
    ok = ok && one_shot::all_reduce<Element>(self, message, cta, team, op);
  } else if constexpr (kAlgorithm == Algorithm::two_shot) {
    ok = ok && two_shot::all_reduce<Element>(self, message, cta, team, op);
  } else {
    ok = ok && ring::all_reduce<Element>(self, message, order, cta, team, op);
  }
  if (ok) return;
  // What this team would have written, and nothing else: other teams may be through.
  const int num_blocks = order == Order::ring ? self.num_ranks() : 1;
  const uint64_t block = ceil_div(message.num_packs, num_blocks);
  const PackRange share = share_of({0, block}, cta, self.capacity.num_ctas);
  for (int i = 0; i < num_blocks; ++i) {
    poison(message, {i * block + share.begin, smaller(i * block + share.end, message.num_packs)}, team);
  }
}

}  // namespace jax_ring
