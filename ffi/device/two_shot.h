// two_shot.h: collectives in two steps, for ranks that all reach each other: scatter to the owners, gather from them.
//
// An all-reduce is a reduce-scatter followed by an all-gather. In each round rank i owns the i-th part of the message.
// All ranks send this part to rank i, which folds it and sends the result to all. Each rank sends 2(p-1)/p of the
// message, as in a ring, but in 2 steps instead of 2(p-1). The other collectives omit senders, the fold, or receivers.
// In an all-to-all and a permutation the owner keeps the received data unfolded.
//
// The rounds of a call overlap. In step s, of N + 2 for N rounds, a rank
//
//   sends the values of round s to the owners,
//   waits until all peers have ended step s - 1,
//   folds its part of round s - 1, and sends the result,
//   copies the results of round s - 2, and
//   tells all peers that it has ended step s.
//
// So the values of a round travel while the rank waits for the previous round's, with one fence per step. No buffer is
// written too early:
//
// - The values of round s go into the buffer of the values of round s - 3. Its owner folded these in its step s - 2,
//   and this rank waited for the end of that step in its own step s - 1. Hence three buffers.
// - The results of round s - 1 go into the buffer of the results of round s - 3. Its receiver copied these in its step
//   s - 1, and this rank has just waited for the end of that step. Hence two buffers.
// - A following call starts with the first buffers. At a call's last wait, for step N, all peers have folded all of its
//   rounds. Its last results are copied before the first step of the next call ends, and the next call writes no
//   results before that.
//
// Steps are counted over all calls. A peer can be one step ahead of the step that this rank waits for, because its next
// step waits for this rank. So even and odd steps have separate flags.
//
// Along a tree, a rank with several slots sends one pack per slot for a pack of the result. A round is shorter then.
// The rank's own values go through its own mailbox, where the same argument holds.
#pragma once

#include <cstdint>
#include <type_traits>

#include "collective/collective.h"
#include "device/fold/fold_pack.h"
#include "device/fold/fold_tree.h"
#include "device/memory/multimem.h"
#include "device/memory/signal.h"

namespace jax_ring {
namespace two_shot {

// The ranks that send, fold and keep results in a collective.
struct Roles {
  Plan plan;

  // Whether each rank's part is a separate block of the operands or results, not a share of one message.
  JAX_RING_INLINE bool have_blocks() const {
    return plan.collective == Collective::reduce_scatter || plan.collective == Collective::all_gather || exchanges();
  }
  // Whether an owner keeps the data that each rank sends it.
  JAX_RING_INLINE bool exchanges() const {
    return plan.collective == Collective::all_to_all || plan.collective == Collective::permute;
  }
  JAX_RING_INLINE int input_block(int owner) const { return num_input_blocks(plan, 2) == 1 ? 0 : owner; }
  JAX_RING_INLINE int output_block(int owner) const { return num_output_blocks(plan, 2) == 1 ? 0 : owner; }

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
    return plan.collective != Collective::reduce_scatter && !exchanges();
  }
  JAX_RING_INLINE bool all_receive() const {
    return plan.collective != Collective::reduce && plan.collective != Collective::reduce_scatter && !exchanges();
  }
  // Whether an owner keeps its part as its own result.
  JAX_RING_INLINE bool keeps_result(int owner) const {
    return receives(owner) || plan.collective == Collective::reduce_scatter;
  }
};

// One team's work in a call.
template <class Team>
struct Worker {
  const Endpoint& self;
  const Message& message;
  Roles roles;
  PackRange share;  // of this team
  uint64_t round_packs;
  int cta;
  Team team;
  uint64_t packs_per_slot;  // of a rank's part of a round

  JAX_RING_TEAM int num_ranks() const { return self.num_ranks(); }
  JAX_RING_TEAM uint32_t num_rounds() const { return static_cast<uint32_t>(ceil_div(share.size(), round_packs)); }
  JAX_RING_TEAM PackRange range(uint32_t round) const {
    const uint64_t begin = share.begin + round * round_packs;
    return {begin, smaller(begin + round_packs, share.end)};
  }
  // The size of a rank's part of a range. The last parts may be shorter.
  JAX_RING_TEAM uint32_t part_size(PackRange range) const {
    return static_cast<uint32_t>(roles.have_blocks() ? range.size() : ceil_div(range.size(), num_ranks()));
  }
  JAX_RING_TEAM uint64_t first_of_part(PackRange range, uint32_t size, int owner) const {
    return range.begin + (roles.have_blocks() ? 0 : static_cast<uint64_t>(owner) * size);
  }
  JAX_RING_TEAM PackRange part(PackRange range, int owner) const {
    const uint32_t size = part_size(range);
    const uint64_t begin = first_of_part(range, size, owner);
    return {begin, smaller(begin + size, range.end)};
  }
  // The rank `step` places after this one, so that not all ranks start with rank 0 and overload its links.
  JAX_RING_TEAM int peer(int step) const { return modulo(self.rank + step, num_ranks()); }
  // The place of a source's packs, in the mailbox of any owner or receiver.
  JAX_RING_TEAM size_t scatter_offset(uint32_t round, int source) const {
    return self.capacity.scatter(static_cast<int>(round % kScatterBuffers), cta, source);
  }
  JAX_RING_TEAM size_t gather_offset(uint32_t round, int source) const {
    return self.capacity.gather(static_cast<int>(round % kGatherBuffers), cta, source);
  }
  JAX_RING_TEAM Pack* packs_at(int owner, size_t offset) const {
    return reinterpret_cast<Pack*>(self.mailbox[owner] + offset);
  }
  JAX_RING_TEAM Pack* scatter_buffer(int owner, uint32_t round, int source) const {
    return packs_at(owner, scatter_offset(round, source));
  }
  JAX_RING_TEAM Pack* gather_buffer(int receiver, uint32_t round, int source) const {
    return packs_at(receiver, gather_offset(round, source));
  }

  // Whether one store reaches all receivers of this rank's result.
  JAX_RING_TEAM bool stores_to_all() const { return self.multicast != nullptr && roles.all_receive(); }
  // Sends a pack of this rank's result to all receivers: `buffer` is the offset of this rank's packs.
  JAX_RING_TEAM void send_result(size_t buffer, uint32_t place, Pack pack) const {
    if (stores_to_all()) return store_to_all(self, buffer + place * kPackBytes, pack);
    if (roles.all_receive()) {
      for (int step = 1; step < num_ranks(); ++step) write_pack(packs_at(peer(step), buffer) + place, pack);
    } else if (roles.receives(roles.plan.root) && self.rank != roles.plan.root) {
      write_pack(packs_at(roles.plan.root, buffer) + place, pack);
    }
  }

  static JAX_RING_TEAM FlagKind flag_of(uint32_t number) { return number % 2 == 0 ? FlagKind::even : FlagKind::odd; }

  // Tells all peers that this team has ended a step: it has read its input, and its writes are complete.
  JAX_RING_TEAM void signal_peers(uint32_t number) const {
    team.sync();
    JAX_RING_NO_UNROLL
    for (int step = 1 + team.thread(); step < num_ranks(); step += team.size()) {
      post_flag(self.flag(peer(step), flag_of(number), cta, self.rank), flag_value(message.fingerprint, number));
    }
  }

  // Waits until all peers have ended a step.
  JAX_RING_TEAM bool await_peers(uint32_t number, Step where) const {
    bool ok = true;
    JAX_RING_NO_UNROLL
    for (int step = 1 + team.thread(); ok && step < num_ranks(); step += team.size()) {
      ok = await_epoch(self, flag_of(number), flag_value(message.fingerprint, number), where, peer(step), cta);
      // Orders this peer's accesses by one address before this team's by another.
      if (self.multicast != nullptr) order_aliases();
    }
    return team.all(ok);
  }
};

// The parts of a range, starting with that of the rank kFirstStep places after this one.
template <class Team, int kFirstStep = 1>
struct PartsWalk {
  const Worker<Team>& worker;
  PackRange range;
  uint32_t size = worker.part_size(range);

  JAX_RING_TEAM PackRange packs() const { return range; }

  // A thread visits the packs at one place in all parts. If the parts are smaller than the team, groups of threads
  // share them, so that all threads have work.
  template <int kCount, class Visitor>
  JAX_RING_TEAM void visit(Team team, Visitor visitor) const {
    const uint32_t threads = team.size(), thread = team.thread();
    const uint32_t group_size = size < threads ? size : threads;
    const int num_groups = size < threads ? threads / size : 1;
    const int group = size < threads ? thread / size : 0;
    const int first_step = kFirstStep + group;
    if (group >= num_groups || first_step >= worker.num_ranks()) return;
    uint32_t place = thread - group * group_size;
    int step = first_step;
    JAX_RING_NO_UNROLL
    while (place < size) {
      Spot spots[kCount];
      bool exists[kCount];
      JAX_RING_UNROLL
      for (int u = 0; u < kCount; ++u) {
        const int owner = worker.peer(step);
        spots[u] = {worker.first_of_part(range, size, owner) + place, place, owner};
        exists[u] = place < size && spots[u].pack < range.end;
        step += num_groups;
        if (step < worker.num_ranks()) continue;
        step = first_step;
        place += group_size;
      }
      visitor(spots, exists);
    }
  }
};

// Data that is only moved is moved as bytes, so the other kernels do without this code.
template <class Element>
constexpr bool kMoves = std::is_same_v<Element, Native<uint8_t>>;

// Sends this rank's operand of a permutation to its receiver.
template <class Team>
JAX_RING_TEAM void send_to_receiver(const Worker<Team>& worker, uint32_t round) {
  const int rank = worker.self.rank, receiver = worker.message.route.receiver;
  if (receiver == kNoRank || receiver == rank) return;
  for_each_pack<kCopiesInFlight>(
      worker.message, RangeWalk{worker.range(round), receiver}, worker.team,
      [&](const auto& operand, uint64_t index, const Spot&) { return operand.load(index); },
      [&](const auto&, uint64_t, const Spot& spot, Pack pack) {
        write_pack(worker.scatter_buffer(spot.owner, round, rank) + spot.place, pack);
      });
}

// Keeps the data that this rank received in a round of an all-to-all or a permutation, and its own part.
template <class Team>
JAX_RING_TEAM void keep_received(const Worker<Team>& worker, uint32_t round) {
  const Roles& roles = worker.roles;
  const int rank = worker.self.rank;
  const PackRange range = worker.range(round);
  const auto load = [&](const auto& operand, uint64_t index, const Spot& spot) {
    if (spot.owner == rank) return operand.load(index, roles.input_block(rank));
    return read_pack(worker.scatter_buffer(rank, round, spot.owner) + spot.place);
  };
  const auto store = [&](const auto& operand, uint64_t index, const Spot& spot, Pack pack) {
    operand.store(index, pack, roles.output_block(spot.owner));
  };
  if (roles.plan.collective == Collective::all_to_all) {
    return for_each_pack<kCopiesInFlight>(worker.message, PartsWalk<Team, 0>{worker, range}, worker.team, load, store);
  }
  const int source = worker.message.route.source;
  if (source == kNoRank) return fill(worker.message, range, 0, worker.team, Pack{});
  for_each_pack<kCopiesInFlight>(worker.message, RangeWalk{range, source}, worker.team, load, store);
}

// Sends each part of a round to its owner.
template <class Team, class Terms>
JAX_RING_TEAM void send_to_owners(const Worker<Team>& worker, uint32_t round, const Terms& terms) {
  const Roles& roles = worker.roles;
  const int rank = worker.self.rank;
  if (!roles.sends(rank)) return;
  JAX_RING_NO_UNROLL
  for (int slot = 0; slot < terms.num_slots(); ++slot) {
    const int first_block = slot * num_input_blocks(roles.plan, worker.num_ranks());
    const size_t buffer = worker.scatter_offset(round, rank) + slot * worker.packs_per_slot * kPackBytes;
    for_each_pack<kCopiesInFlight>(
        worker.message, PartsWalk<Team, Terms::kFirstStep>{worker, worker.range(round)}, worker.team,
        [&](const auto& operand, uint64_t index, const Spot& spot) {
          return operand.load(index, first_block + roles.input_block(spot.owner));
        },
        [&](const auto&, uint64_t, const Spot& spot, Pack pack) {
          write_pack(worker.packs_at(spot.owner, buffer) + spot.place, pack);
        });
  }
}

// Packs that a thread folds at a time. The accumulators of small types leave registers for one.
template <class Element>
constexpr int kFoldsInFlight = kPerPack<Element> <= 8 ? 2 : 1;

// The data that a thread loads for a pack of a result: its own values, and the first peers'.
template <class Element>
struct Loaded {
  Pack mine;
  PeerPacks<kPeersInFlight<Element>> peers;
};

// Folds this rank's part of a round, keeps the result and sends it, in one pass.
template <class Element, class Op, class Team>
JAX_RING_TEAM void fold_and_send(const Worker<Team>& worker, uint32_t round, Op op, const RankTerms&) {
  const Roles& roles = worker.roles;
  const int rank = worker.self.rank, p = worker.num_ranks(), root = roles.plan.root;
  const int first_rank = roles.first_rank(p, rank), own = modulo(p + rank - first_rank, p);
  const int in = roles.input_block(rank), out = roles.output_block(rank);
  const bool moves_received = kMoves<Element> && roles.plan.collective == Collective::broadcast && rank != root;
  const Pack* received = worker.scatter_buffer(rank, round, 0);
  const uint64_t part_packs = worker.self.capacity.part_packs;
  const size_t results = worker.gather_offset(round, rank);
  const auto load_peers = [&](int first, uint32_t place) {
    PeerPacks<kPeersInFlight<Element>> packs{};
    JAX_RING_UNROLL
    for (int i = 0; i < kPeersInFlight<Element>; ++i) {
      if (first + i >= p - 1) continue;
      const int source = modulo(first_rank + place_of_peer(first + i, own), p);
      packs.pack[i] = read_pack(received + source * part_packs + place);
    }
    return packs;
  };
  for_each_pack<kFoldsInFlight<Element>>(
      worker.message, RangeWalk{worker.part(worker.range(round), rank)}, worker.team,
      [&](const auto& operand, uint64_t index, const Spot& spot) {
        if (moves_received) return Loaded<Element>{read_pack(received + root * part_packs + spot.place), {}};
        Loaded<Element> loaded{operand.load(index, in), {}};
        if (!kMoves<Element> || roles.folds()) loaded.peers = load_peers(0, spot.place);
        return loaded;
      },
      [&](const auto& operand, uint64_t index, const Spot& spot, const Loaded<Element>& loaded) {
        Pack pack = loaded.mine;
        if (!kMoves<Element> || roles.folds()) {
          const auto load = [&](int first) { return load_peers(first, spot.place); };
          pack = fold_packs<Element>(p, own, loaded.mine, loaded.peers, load, op);
        }
        if (roles.keeps_result(rank)) operand.store(index, pack, out);
        worker.send_result(results, spot.place, pack);
      });
}

// Folds along a tree, and sends each result of a reduce-scatter.
template <class Element, class Op, class Team>
JAX_RING_TEAM void fold_and_send(const Worker<Team>& worker, uint32_t round, Op op, const TreeTerms& terms) {
  const Roles& roles = worker.roles;
  const int rank = worker.self.rank;
  const TreeProgram& program = terms.program;
  const Pack* received = worker.scatter_buffer(rank, round, 0);
  const uint32_t per_rank = static_cast<uint32_t>(worker.self.capacity.part_packs);
  const uint32_t per_slot = static_cast<uint32_t>(worker.packs_per_slot);
  const size_t results = worker.gather_offset(round, rank);
  JAX_RING_NO_UNROLL
  for (int result = 0; result < terms.num_results(); ++result) {
    for_each_pack<1>(
        worker.message, RangeWalk{worker.part(worker.range(round), rank)}, worker.team,
        [&](const auto&, uint64_t, const Spot& spot) {
          const auto load = [&](int first, int part) {
            Pieces<Element> pieces{};
            JAX_RING_UNROLL
            for (int i = 0; i < kTermsInFlight<Element>; ++i) {
              if (!program.exists(first + i)) continue;
              const uint32_t term = per_rank * program.member(first + i) + per_slot * program.slot(first + i);
              pieces.piece[i] = read_piece<kPieceWords<Element>>(received + (term + spot.place), part);
            }
            return pieces;
          };
          return fold_tree<Element>(program, result, load, op);
        },
        [&](const auto& operand, uint64_t index, const Spot& spot, Pack pack) {
          if (roles.keeps_result(rank)) operand.store(index, pack, result);
          worker.send_result(results, spot.place, pack);
        });
  }
}

// Copies the peers' parts of the result of a round to the outputs.
template <class Team>
JAX_RING_TEAM void copy_results(const Worker<Team>& worker, uint32_t round) {
  const Roles& roles = worker.roles;
  const int rank = worker.self.rank;
  const PackRange range = worker.range(round);
  if (roles.plan.collective == Collective::reduce && !roles.keeps_result(rank)) {
    return fill(worker.message, range, 0, worker.team, Pack{});
  }
  if (!roles.receives(rank)) return;
  const Pack* received = worker.gather_buffer(rank, round, 0);
  const uint64_t part_packs = worker.self.capacity.part_packs;
  for_each_pack<kCopiesInFlight>(
      worker.message, PartsWalk<Team>{worker, range}, worker.team,
      [&](const auto&, uint64_t, const Spot& spot) {
        return read_pack(received + spot.owner * part_packs + spot.place);
      },
      [&](const auto& operand, uint64_t index, const Spot& spot, Pack pack) {
        operand.store(index, pack, roles.output_block(spot.owner));
      });
}

// Runs the team's share of a collective. Returns false if a wait failed; the rank's failure record names the peer.
template <class Element, class Op, class Team, class Terms = RankTerms>
JAX_RING_TEAM bool run(const Endpoint& self, const Message& message, const Plan& plan, int cta, Team team, Op op,
                       const Terms& terms = {}) {
  Progress& progress = self.progress[cta];
  const Roles roles{plan};
  const uint64_t packs_per_slot = self.capacity.part_packs / terms.num_slots();
  const uint64_t round_packs = packs_per_slot * (roles.have_blocks() ? 1 : self.num_ranks());
  const Worker<Team> worker{self,        message, roles, share_of({0, message.num_packs}, cta, self.capacity.num_ctas),
                            round_packs, cta,     team,  packs_per_slot};
  const uint32_t num_rounds = worker.num_rounds();
  // A team without work meets at no barrier after which all its threads would have read the number.
  if (num_rounds == 0) return true;
  uint32_t number = progress.round;
  bool ok = true;
  JAX_RING_NO_UNROLL
  for (uint32_t step = 0; ok && step < num_rounds + 2; ++step) {
    if (step < num_rounds) {
      if (kMoves<Element> && plan.collective == Collective::permute) {
        send_to_receiver(worker, step);
      } else {
        send_to_owners(worker, step, terms);
      }
    }
    if (step > 0) ok = worker.await_peers(number, step <= num_rounds ? Step::reduce_scatter : Step::all_gather);
    if (!ok) break;
    if (step > 0 && step <= num_rounds) {
      if (kMoves<Element> && roles.exchanges()) {
        keep_received(worker, step - 1);
      } else {
        fold_and_send<Element>(worker, step - 1, op, terms);
      }
    }
    if (step > 1) copy_results(worker, step - 2);
    if (step <= num_rounds) worker.signal_peers(++number);
  }
  team.sync();  // the last results have been copied
  if (ok && team.thread() == 0) progress.round = number;
  return ok;
}

}  // namespace two_shot
}  // namespace jax_ring
