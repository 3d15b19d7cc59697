// two_shot.h: collectives in two steps, for ranks that all reach each other: scatter to the owners, gather from them.
//
// An all-reduce is a reduce-scatter followed by an all-gather. In each round rank i owns the i-th part of the message.
// All ranks send this part to i, which folds it and sends the result to all. Each rank sends 2(p-1)/p of the message,
// as in a ring, but in 2 steps instead of 2(p-1). The other collectives leave out senders, the fold, or receivers.
//
// One buffer per peer and step is enough: a rank signals its next step only after it has read the data of the last one,
// and no rank writes before all have signaled.
#pragma once

#include "ring/collective.h"
#include "ring/fold_pack.h"
#include "ring/signal.h"

namespace jax_ring {
namespace two_shot {

// Which ranks send, fold and keep results in a collective.
struct Roles {
  Plan plan;

  // Whether each rank's part is a block of its own, of the operands or of the results, and not a share of one message.
  JAX_RING_INLINE bool have_blocks() const {
    return plan.collective == Collective::reduce_scatter || plan.collective == Collective::all_gather;
  }
  JAX_RING_INLINE int input_block(int owner) const { return plan.collective == Collective::reduce_scatter ? owner : 0; }
  JAX_RING_INLINE int output_block(int owner) const { return plan.collective == Collective::all_gather ? owner : 0; }

  // The ranks that send to the owners. In an all-gather the owners already have the data.
  JAX_RING_INLINE bool sends(int rank) const {
    if (plan.collective == Collective::broadcast) return rank == plan.root;
    return plan.collective != Collective::all_gather;
  }
  JAX_RING_INLINE bool folds() const {
    return plan.collective != Collective::broadcast && plan.collective != Collective::all_gather;
  }
  // The rank at which the fold for an owner starts.
  JAX_RING_INLINE int first_rank(int num_ranks, int owner) const {
    return plan.order == Order::ring ? ring_first_rank(num_ranks, owner) : 0;
  }
  // The ranks that the owners send to.
  JAX_RING_INLINE bool receives(int rank) const {
    if (plan.collective == Collective::reduce) return rank == plan.root;
    return plan.collective != Collective::reduce_scatter;
  }
  // Whether an owner keeps its part as its own result.
  JAX_RING_INLINE bool keeps_result(int owner) const {
    return receives(owner) || plan.collective == Collective::reduce_scatter;
  }
};

// One team's work in one round.
template <class Team>
struct Round {
  const Endpoint& self;
  const Message& message;
  Roles roles;
  PackRange range;  // of the message
  int cta;
  Team team;
  uint32_t number;

  JAX_RING_TEAM int num_ranks() const { return self.num_ranks(); }
  JAX_RING_TEAM PackRange part(int owner) const {
    return roles.have_blocks() ? range : share_of(range, owner, num_ranks());
  }
  // The rank `step` places after this one, so that not all ranks start with rank 0, whose links would be a bottleneck.
  JAX_RING_TEAM int peer(int step) const { return (self.rank + step) % num_ranks(); }
  JAX_RING_TEAM Pack* scatter_buffer(int owner, int source) const {
    return reinterpret_cast<Pack*>(self.mailbox[owner] + self.capacity.scatter(cta, source));
  }
  JAX_RING_TEAM Pack* gather_buffer(int receiver, int source) const {
    return reinterpret_cast<Pack*>(self.mailbox[receiver] + self.capacity.gather(cta, source));
  }
  JAX_RING_TEAM uint64_t flag() const { return flag_value(message.fingerprint, number); }

  // Signals all peers that the data this rank wrote for them is complete.
  JAX_RING_TEAM void signal_peers(FlagKind kind) const {
    team.sync();
    for (int step = 1 + team.thread(); step < num_ranks(); step += team.size()) {
      post_flag(self.flag(peer(step), kind, cta, self.rank), flag());
    }
  }

  // Waits for the signals of all peers.
  JAX_RING_TEAM bool await_all(FlagKind kind, Step where) const {
    bool ok = true;
    for (int step = 1 + team.thread(); ok && step < num_ranks(); step += team.size()) {
      ok = await_epoch(self, kind, flag(), where, peer(step), cta);
    }
    return team.all(ok);
  }
};

// Sends each part to its owner.
template <class Team>
JAX_RING_TEAM bool send_to_owners(const Round<Team>& round) {
  const int rank = round.self.rank;
  for (int step = 1; round.roles.sends(rank) && step < round.num_ranks(); ++step) {
    const int owner = round.peer(step), block = round.roles.input_block(owner);
    Pack* to = round.scatter_buffer(owner, rank);
    for_each_pack<kCopiesInFlight>(
        round.message, RangeWalk{round.part(owner)}, round.team,
        [&](const Operand& operand, uint64_t index, const Spot&) { return input_pack(operand, index, block); },
        [&](const Operand&, uint64_t, const Spot& spot, Pack pack) { write_pack(to + spot.place, pack); });
  }
  round.signal_peers(FlagKind::scattered);
  return round.await_all(FlagKind::scattered, Step::reduce_scatter);
}

// Folds this rank's part, keeps the result and sends it, in one pass.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool fold_and_send(const Round<Team>& round, Op op) {
  const Roles& roles = round.roles;
  const int rank = round.self.rank, p = round.num_ranks(), root = roles.plan.root;
  const int first = roles.first_rank(p, rank), in = roles.input_block(rank), out = roles.output_block(rank);
  for_each_pack<1>(
      round.message, RangeWalk{round.part(rank)}, round.team,
      [&](const Operand& operand, uint64_t index, const Spot& spot) {
        const auto from = [&](int source) {
          return source == rank ? input_pack(operand, index, in)
                                : read_pack(round.scatter_buffer(rank, source) + spot.place);
        };
        if (!roles.folds()) return from(roles.plan.collective == Collective::broadcast ? root : rank);
        return fold_packs<Element>(p, [&](int i) { return from((first + i) % p); }, op);
      },
      [&](const Operand& operand, uint64_t index, const Spot& spot, Pack pack) {
        if (roles.keeps_result(rank)) output_pack(operand, index, pack, out);
        for (int step = 1; step < p; ++step) {
          if (roles.receives(round.peer(step)))
            write_pack(round.gather_buffer(round.peer(step), rank) + spot.place, pack);
        }
      });
  round.signal_peers(FlagKind::gathered);
  return round.await_all(FlagKind::gathered, Step::all_gather);
}

// Copies the peers' parts of the result to the outputs.
template <class Team>
JAX_RING_TEAM void copy_results(const Round<Team>& round) {
  const Roles& roles = round.roles;
  if (roles.plan.collective == Collective::reduce && !roles.keeps_result(round.self.rank)) {
    return fill(round.message, round.range, 0, round.team, Pack{});
  }
  for (int step = 1; roles.receives(round.self.rank) && step < round.num_ranks(); ++step) {
    const int owner = round.peer(step), block = roles.output_block(owner);
    const Pack* from = round.gather_buffer(round.self.rank, owner);
    for_each_pack<kCopiesInFlight>(
        round.message, RangeWalk{round.part(owner)}, round.team,
        [&](const Operand&, uint64_t, const Spot& spot) { return read_pack(from + spot.place); },
        [&](const Operand& operand, uint64_t index, const Spot&, Pack pack) {
          output_pack(operand, index, pack, block);
        });
  }
}

// Runs the team's share of a collective. Returns false if a wait failed; the rank's failure record names the peer.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool run(const Endpoint& self, const Message& message, const Plan& plan, int cta, Team team, Op op) {
  Progress& progress = self.progress[cta];
  uint32_t number = progress.round;
  const Roles roles{plan};
  const uint64_t round_packs = self.capacity.part_packs * (roles.have_blocks() ? 1 : self.num_ranks());
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  bool ok = true;
  for (uint64_t begin = share.begin; ok && begin < share.end; begin += round_packs) {
    const PackRange range{begin, smaller(begin + round_packs, share.end)};
    const Round<Team> round{self, message, roles, range, cta, team, ++number};
    ok = send_to_owners(round) && fold_and_send<Element>(round, op);
    if (ok) copy_results(round);
  }
  if (ok && team.thread() == 0) progress.round = number;
  return ok;
}

}  // namespace two_shot
}  // namespace jax_ring
