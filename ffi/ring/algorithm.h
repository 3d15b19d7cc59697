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
  if (!ok) poison(message, share_of({0, message.num_packs}, cta, self.capacity.num_ctas), team);
}

}  // namespace jax_ring
