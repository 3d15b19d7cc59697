// multicast.h: all-reduce in an NVSwitch: one load adds what all ranks have at an address, one store writes to all.
//
// Like two_shot.h, but it sends less: in each round every rank writes its values into its own mailbox, then each rank
// loads the sums of its part of the round and stores them to all mailboxes at once. Each GPU sends (p+1)/p of the
// message, in two-shot 2(p-1)/p. Steps, flags and buffers are those of two_shot.h, and so is the proof that no buffer
// is written too early: read "loads the sums of" for "folds". So calls of both may follow each other in a lane.
//
// The switch adds in an order of its own, so this is for Order::any. All ranks still get the same bits: one of them
// loads each sum, and stores it to all.
#pragma once

#include "device/memory/multimem.h"
#include "device/two_shot.h"

namespace jax_ring {

namespace multicast {

// Writes this rank's values of a round into its own mailbox.
template <class Team>
JAX_RING_TEAM void stage(const two_shot::Worker<Team>& worker, uint32_t round) {
  Pack* const to = worker.scatter_buffer(worker.self.rank, round, 0);
  for_each_pack<kCopiesInFlight>(
      worker.message, RangeWalk{worker.range(round)}, worker.team,
      [](const auto& operand, uint64_t index, const Spot&) { return operand.load(index); },
      [&](const auto&, uint64_t, const Spot& spot, Pack pack) { write_pack(to + spot.place, pack); });
}

// Stores the sums of this rank's part of a round to all mailboxes.
template <class Element, class Team>
JAX_RING_TEAM void sum_and_send(const two_shot::Worker<Team>& worker, uint32_t round) {
  const Endpoint& self = worker.self;
  const PackRange range = worker.range(round), part = worker.part(range, self.rank);
  const size_t first = (part.begin - range.begin) * kPackBytes;
  const size_t from = self.capacity.scatter(static_cast<int>(round % kScatterBuffers), worker.cta, 0) + first;
  const size_t to = self.capacity.gather(static_cast<int>(round % kGatherBuffers), worker.cta, 0) + first;
  const uint32_t size = static_cast<uint32_t>(part.size()), threads = worker.team.size();
  JAX_RING_NO_UNROLL
  for (uint32_t at = worker.team.thread(); at < size; at += kCopiesInFlight * threads) {
    Pack sums[kCopiesInFlight] = {};
    JAX_RING_UNROLL
    for (int u = 0; u < kCopiesInFlight; ++u) {
      if (at + u * threads < size) sums[u] = load_sum<Element>(self, from + (at + u * threads) * kPackBytes);
    }
    JAX_RING_UNROLL
    for (int u = 0; u < kCopiesInFlight; ++u) {
      if (at + u * threads < size) store_to_all(self, to + (at + u * threads) * kPackBytes, sums[u]);
    }
  }
}

// Copies the results of a round to the outputs.
template <class Team>
JAX_RING_TEAM void copy_round(const two_shot::Worker<Team>& worker, uint32_t round) {
  const Pack* const from = worker.gather_buffer(worker.self.rank, round, 0);
  for_each_pack<kCopiesInFlight>(
      worker.message, RangeWalk{worker.range(round)}, worker.team,
      [&](const auto&, uint64_t, const Spot& spot) { return read_pack(from + spot.place); },
      [](const auto& operand, uint64_t index, const Spot&, Pack pack) { operand.store(index, pack); });
}

// All-reduces the team's share of the message. Returns false if a wait failed; the rank's failure record names the
// peer.
template <class Element, class Team>
JAX_RING_TEAM bool all_reduce(const Endpoint& self, const Message& message, int cta, Team team) {
  Progress& progress = self.progress[cta];
  const two_shot::Worker<Team> worker{self,
                                      message,
                                      two_shot::Roles{Plan{}},
                                      share_of({0, message.num_packs}, cta, self.capacity.num_ctas),
                                      self.capacity.part_packs * self.num_ranks(),
                                      cta,
                                      team,
                                      self.capacity.part_packs};
  const uint32_t num_rounds = worker.num_rounds();
  // A team without work meets at no barrier after which all its threads would have read the number.
  if (num_rounds == 0) return true;
  uint32_t number = progress.round;
  bool ok = true;
  JAX_RING_NO_UNROLL
  for (uint32_t step = 0; ok && step < num_rounds + 2; ++step) {
    if (step < num_rounds) stage(worker, step);
    if (step > 0) ok = worker.await_peers(number, step <= num_rounds ? Step::reduce_scatter : Step::all_gather);
    if (!ok) break;
    if (step > 0 && step <= num_rounds) sum_and_send<Element>(worker, step - 1);
    if (step > 1) copy_round(worker, step - 2);
    if (step <= num_rounds) worker.signal_peers(++number);
  }
  team.sync();  // the last results have been copied
  if (ok && team.thread() == 0) progress.round = number;
  return ok;
}

}  // namespace multicast
}  // namespace jax_ring
