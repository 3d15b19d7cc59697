// ring.h: all-reduce and reduce around a ring. Each rank sends only to the next one, as in schedule.h, and never more
// than fits into its slots. For ranks without all-to-all access, and for messages too large for latency to matter.
//
// Partial folds are sent in the accumulator's type, so a ring rounds a result only once too.
#pragma once

#include "collective/collective.h"
#include "collective/schedule.h"
#include "device/fold/fold_pack.h"
#include "device/memory/signal.h"

namespace jax_ring {
namespace ring {

// One team's position in the ring: the next rank's slots, which it fills, and its own, which it drains.
template <class Team>
struct Link {
  const Endpoint& self;
  int cta;
  Team team;
  uint32_t fingerprint;
  uint32_t sent;
  uint32_t received;

  JAX_RING_TEAM int next() const { return (self.rank + 1) % self.num_ranks(); }
  JAX_RING_TEAM int previous() const { return (self.rank + self.num_ranks() - 1) % self.num_ranks(); }
  JAX_RING_TEAM Pack* slot(int owner, uint32_t item) const {
    const uint64_t index = item % self.capacity.num_slots;
    return reinterpret_cast<Pack*>(self.mailbox[owner] + self.capacity.slot(cta, index));
  }

  // Waits for a free slot at the next rank.
  JAX_RING_TEAM bool await_space() const {
    bool ok = true;
    if (team.thread() == 0) {
      uint64_t* head = self.flag(self.rank, FlagKind::head, cta, 0);
      const uint32_t needed = sent + 1 - static_cast<uint32_t>(self.capacity.num_slots);
      ok = await(
          self, [&] { return !is_before(epoch_of(load_flag(head)), needed); }, Step::ring_send, [&] { return next(); },
          needed, cta);
    }
    return team.all(ok);
  }

  // Waits for the next item from the previous rank.
  JAX_RING_TEAM bool await_item() const {
    bool ok = true;
    if (team.thread() == 0) {
      uint64_t* tail = self.flag(self.rank, FlagKind::tail, cta, 0);
      ok = await(
          self, [&] { return is_before(received, epoch_of(load_flag(tail))); }, Step::ring_receive,
          [&] { return previous(); }, received + 1, cta);
      // The flag may already belong to a later call, so each item carries its call's fingerprint.
      if (ok && read_word(slot(self.rank, received)->word) != fingerprint) {
        fail(self, FailureKind::mismatch, Step::ring_receive, previous(), received + 1, cta);
        ok = false;
      }
    }
    return team.all(ok);
  }

  JAX_RING_TEAM Pack* outgoing() const { return slot(next(), sent) + 1; }
  JAX_RING_TEAM const Pack* incoming() const { return slot(self.rank, received) + 1; }

  // Ends a hop: publishes the written data, and frees the slot that was read. Each post waits for a fence. Three warps
  // share the posts, so that the fences overlap and the first thread already waits for the next item.
  JAX_RING_TEAM void finish(bool sends, bool receives) {
    team.sync();
    sent += sends;
    received += receives;
    if (sends && team.thread() == team.size() - 1) {
      write_word(slot(next(), sent - 1)->word, fingerprint);
      post_flag(self.flag(next(), FlagKind::tail, cta, 0), sent);
    }
    if (receives && team.thread() == team.size() / 2) {
      post_flag(self.flag(previous(), FlagKind::head, cta, 0), received);
    }
  }
};

// Executes one hop on the packs of one chunk. Returns false if a wait for a neighbor failed.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool run_hop(const Message& message, Hop hop, PackRange chunk, bool keeps_result, Link<Team>& link,
                           Op op) {
  constexpr int kPartial = PackFold<Element>::kPacks;
  constexpr int kFoldsInFlight = 2;
  if (hop.receives() && !link.await_item()) return false;
  if (hop.sends() && !link.await_space()) return false;
  const Pack* in = link.incoming();
  Pack* out = link.outgoing();
  if (hop.receives_result()) {
    for_each_pack<kCopiesInFlight>(
        message, RangeWalk{chunk}, link.team,
        [&](const auto&, uint64_t, const Spot& spot) { return read_pack(in + spot.place); },
        [&](const auto& operand, uint64_t index, const Spot& spot, Pack pack) {
          operand.store(index, keeps_result ? pack : Pack{});
          if (hop.sends()) write_pack(out + spot.place, pack);
        });
  } else {
    for_each_pack<kFoldsInFlight>(
        message, RangeWalk{chunk}, link.team,
        [&](const auto& operand, uint64_t index, const Spot& spot) {
          const Pack mine = operand.load(index);
          PackFold<Element> fold;
          if (hop.receives()) {
            fold.restore(in + kPartial * spot.place);
            fold.add(mine, op);
          } else {
            fold.start(mine);
          }
          return fold;
        },
        [&](const auto& operand, uint64_t index, const Spot& spot, const PackFold<Element>& fold) {
          if (!hop.has_result()) return fold.save(out + kPartial * spot.place);
          const Pack result = fold.result();
          operand.store(index, keeps_result ? result : Pack{});
          write_pack(out + spot.place, result);
        });
  }
  link.finish(hop.sends(), hop.receives());
  return true;
}

// The team's chunks of the message.
struct Chunks {
  Order order;
  int num_ranks;
  uint64_t num_packs;  // of the message
  uint64_t block;      // packs per block of the message; the last blocks may be shorter
  PackRange share;     // of this team: within each block, or with Order::rank within the message
  uint64_t chunk_packs;

  JAX_RING_INLINE uint64_t count() const {
    return ceil_div(share.size(), chunk_packs) * (order == Order::ring ? num_ranks : 1);
  }

  // Empty where the last blocks are shorter.
  JAX_RING_INLINE PackRange operator[](uint64_t chunk) const {
    const uint64_t base = order == Order::ring ? chunk % num_ranks * block : 0;
    const uint64_t piece = order == Order::ring ? chunk / num_ranks : chunk;
    const uint64_t end = smaller(share.begin + (piece + 1) * chunk_packs, share.end);
    return {base + share.begin + piece * chunk_packs, smaller(base + end, num_packs)};
  }
};

// Reduces the team's share of the message, for all ranks or for the root. Returns false if a wait for a neighbor
// failed; the rank's failure record names it.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool reduce(const Endpoint& self, const Message& message, const Plan& plan, int cta, Team team, Op op) {
  const Order order = plan.order;
  const bool keeps_result = plan.collective == Collective::all_reduce || self.rank == plan.root;
  Progress& progress = self.progress[cta];
  const Capacity& capacity = self.capacity;
  const int p = self.num_ranks();
  const uint64_t block = order == Order::ring ? ceil_div(message.num_packs, p) : message.num_packs;
  const Chunks chunks{order,
                      p,
                      message.num_packs,
                      block,
                      share_of({0, block}, cta, capacity.num_ctas),
                      capacity.slot_packs / PackFold<Element>::kPacks};
  const RingSchedule schedule{order, p, self.rank, chunks.count(), capacity.num_slots - 1};
  Link<Team> link{self, cta, team, message.fingerprint, progress.sent, progress.received};
  bool ok = true;
  JAX_RING_NO_UNROLL
  for (uint64_t step = 0; ok && step < schedule.num_steps(); ++step) {
    const Hop hop = schedule.step(step);
    if (!hop.exists() || chunks[hop.chunk].size() == 0) continue;
    ok = run_hop<Element>(message, hop, chunks[hop.chunk], keeps_result, link, op);
  }
  // A team without work meets at no barrier after which all its threads would have read the counters.
  if (schedule.num_steps() == 0) return ok;
  team.sync();  // the last flags have been posted
  if (ok && team.thread() == 0) {
    progress.sent = link.sent;
    progress.received = link.received;
  }
  return ok;
}

}  // namespace ring
}  // namespace jax_ring
