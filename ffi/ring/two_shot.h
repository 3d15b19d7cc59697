// two_shot.h: all-reduce in two steps, where every rank reaches every other: a reduce-scatter, then an all-gather.
//
// In each round rank i owns the i-th part of the message. Everybody sends it to i, i folds it in the order of the ranks
// and sends the result to everybody. Each rank sends 2(p-1)/p of the message, as round a ring, in 2 steps instead of
// 2(p-1). One buffer for each peer and step is enough: a rank sends its next part i when it has the round's part i of
// the result, and i sends the next result when it has everybody's next part, so that what they overwrite has been read.
#pragma once

#include "ring/fold_pack.h"
#include "ring/signal.h"

namespace jax_ring {
namespace two_shot {

// What one team does in one round.
template <class Team>
struct Round {
  const Endpoint& self;
  const Message& message;
  PackRange range;  // of the message
  int cta;
  Team team;
  uint32_t number;

  JAX_RING_TEAM int num_ranks() const { return self.num_ranks(); }
  JAX_RING_TEAM PackRange part(int owner) const { return share_of(range, owner, num_ranks()); }
  // The rank that comes `step` after this one: if all began with rank 0, its links would be the bottleneck.
  JAX_RING_TEAM int peer(int step) const { return (self.rank + step) % num_ranks(); }
  JAX_RING_TEAM Pack* scatter_buffer(int owner, int source) const {
    return reinterpret_cast<Pack*>(self.mailbox[owner] + self.capacity.scatter(cta, source));
  }
  JAX_RING_TEAM Pack* gather_buffer(int receiver, int source) const {
    return reinterpret_cast<Pack*>(self.mailbox[receiver] + self.capacity.gather(cta, source));
  }
  JAX_RING_TEAM uint64_t flag() const { return flag_value(message.fingerprint, number); }

  // Tells all peers that what this rank wrote for them is there.
  JAX_RING_TEAM void announce(FlagKind kind) const {
    team.sync();
    for (int step = 1 + team.thread(); step < num_ranks(); step += team.size()) {
      post(self.flag(peer(step), kind, cta, self.rank), flag());
    }
  }

  // Waits until all peers have announced.
  JAX_RING_TEAM bool await_all(FlagKind kind, Step where) const {
    bool ok = true;
    for (int step = 1 + team.thread(); ok && step < num_ranks(); step += team.size()) {
      ok = await_epoch(self, kind, flag(), where, peer(step), cta);
    }
    return team.all(ok);
  }
};

// Sends every part to its owner, and folds this rank's own; store(operand, index, place, pack) takes the result.
template <class Element, class Op, class Team, class Store>
JAX_RING_TEAM bool reduce_scatter(const Round<Team>& round, Op op, Store store) {
  const int rank = round.self.rank;
  for (int step = 1; step < round.num_ranks(); ++step) {
    Pack* to = round.scatter_buffer(round.peer(step), rank);
    for_each_pack<kCopiesInFlight>(
        round.message, round.part(round.peer(step)), round.team,
        [](const Operand& operand, uint64_t index, uint64_t) { return input_pack(operand, index); },
        [&](const Operand&, uint64_t, uint64_t place, Pack pack) { to[place] = pack; });
  }
  round.announce(FlagKind::scattered);
  if (!round.await_all(FlagKind::scattered, Step::reduce_scatter)) return false;
  for_each_pack<1>(
      round.message, round.part(rank), round.team,
      [&](const Operand& operand, uint64_t index, uint64_t place) {
        return fold_packs<Element>(
            round.num_ranks(),
            [&](int source) {
              return source == rank ? input_pack(operand, index) : round.scatter_buffer(rank, source)[place];
            },
            op);
      },
      store);
  return true;
}

// Takes every part of the result but this rank's own, which its peers are given by `send`.
template <class Team>
JAX_RING_TEAM bool all_gather(const Round<Team>& round) {
  round.announce(FlagKind::gathered);
  if (!round.await_all(FlagKind::gathered, Step::all_gather)) return false;
  for (int step = 1; step < round.num_ranks(); ++step) {
    const Pack* from = round.gather_buffer(round.self.rank, round.peer(step));
    for_each_pack<kCopiesInFlight>(
        round.message, round.part(round.peer(step)), round.team,
        [&](const Operand&, uint64_t, uint64_t place) { return from[place]; },
        [](const Operand& operand, uint64_t index, uint64_t, Pack pack) { output_pack(operand, index, pack); });
  }
  return true;
}

// All-reduces the team's share of the message. False if a peer did not come; the rank's failure then says which.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool all_reduce(const Endpoint& self, const Message& message, int cta, Team team, Op op) {
  Progress& progress = self.progress[cta];
  uint32_t number = progress.round;
  const uint64_t round_packs = self.capacity.part_packs * self.num_ranks();
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  bool ok = true;
  for (uint64_t begin = share.begin; ok && begin < share.end; begin += round_packs) {
    const PackRange range{begin, smaller(begin + round_packs, share.end)};
    const Round<Team> round{self, message, range, cta, team, ++number};
    // The owner of a part keeps the result and sends it on in one go: the all-gather begins where the fold ends.
    ok = reduce_scatter<Element>(round, op, [&](const Operand& operand, uint64_t index, uint64_t place, Pack pack) {
      output_pack(operand, index, pack);
      for (int step = 1; step < round.num_ranks(); ++step) {
        round.gather_buffer(round.peer(step), self.rank)[place] = pack;
      }
    });
    ok = ok && all_gather(round);
  }
  if (ok && team.thread() == 0) progress.round = number;
  return ok;
}

}  // namespace two_shot
}  // namespace jax_ring
