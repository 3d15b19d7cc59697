// one_shot.h: all-reduce of small messages in one step: every rank sends its message to all ranks, and folds all of
// them.
//
// Data and the round's tag travel in the same words (as in NCCL's LL protocol), so there is no flag to wait for and no
// fence: p-1 sends and a poll. One round exchanges a message up to the default threshold, but at most a pack per
// thread, which sends, waits and folds once. Two sets of lines alternate. A rank rewrites a set two rounds later. By
// then it has finished the round in between, and every peer sent its data for that round only after reading this set.
//
// Along a tree, a rank with several slots sends one pack per slot for a pack of the result. A round is shorter then.
#pragma once

#include "device/fold/fold_pack.h"
#include "device/fold/fold_tree.h"
#include "device/memory/signal.h"

namespace jax_ring {
namespace one_shot {

JAX_RING_TEAM Line tagged(uint64_t data, uint32_t tag) {
  const uint64_t high = static_cast<uint64_t>(tag) << 32;
  return {{high | static_cast<uint32_t>(data), high | (data >> 32)}};
}
JAX_RING_TEAM bool has_tag(const Line& line, uint32_t tag) {
  return line.word[0] >> 32 == tag && line.word[1] >> 32 == tag;
}
JAX_RING_TEAM uint64_t data_of(const Line& line) { return (line.word[0] & 0xffffffffu) | line.word[1] << 32; }

JAX_RING_TEAM Line* lines(const Endpoint& self, int owner, int cta, int source, uint32_t epoch) {
  const size_t offset = self.capacity.lines(static_cast<int>(epoch % 2), cta, source);
  return reinterpret_cast<Line*>(self.mailbox[owner] + offset);
}

// Sends two lines beside the packs. One is the header, which identifies the call. The other is a line that this round
// does not use, a different one each round, so that no line keeps its tag until the epochs wrap around. A rank's lines
// to itself need neither: the thread that reads one has just written it.
template <class Team, class Terms>
JAX_RING_TEAM void announce(const Endpoint& self, const Message& message, PackRange range, int cta, Team team,
                            uint32_t epoch, const Terms& terms) {
  const int p = self.num_ranks();
  // From the last thread on: the first ones have packs to send.
  for (int step = team.size() - team.thread(); step < p; step += team.size()) {
    Line* to = lines(self, modulo(self.rank + step, p), cta, self.rank, epoch);
    store_line(to + self.capacity.header(), tagged(message.fingerprint, epoch));
    const uint32_t swept = epoch / 2 % static_cast<uint32_t>(self.capacity.header());
    if (pack_of_line(swept) >= terms.num_slots() * range.size()) store_line(to + swept, tagged(0, epoch));
  }
}

// Sends a pack to the ranks from kFirstStep places after this one on.
template <int kFirstStep>
JAX_RING_TEAM void send(const Endpoint& self, uint32_t place, Pack pack, int cta, uint32_t epoch) {
  const int p = self.num_ranks();
  for (int step = kFirstStep; step < p; ++step) {
    Line* to = lines(self, modulo(self.rank + step, p), cta, self.rank, epoch) + line_of_pack(place);
    store_line(to, tagged(pack.word[0], epoch));
    store_line(to + kPacksPerGroup, tagged(pack.word[1], epoch));
  }
}

// Waits until every peer has announced the same call, before waiting for data that another call would not send.
template <class Team>
JAX_RING_TEAM bool check_headers(const Endpoint& self, const Message& message, int cta, Team team, uint32_t epoch) {
  bool ok = true;
  // From the last thread on: the first ones have packs to fold.
  for (int source = team.size() - 1 - team.thread(); ok && source < self.num_ranks(); source += team.size()) {
    if (source == self.rank) continue;
    Line header;
    ok = await(
        self,
        [&] {
          header = load_line(lines(self, self.rank, cta, source, epoch) + self.capacity.header());
          return has_tag(header, epoch);
        },
        Step::one_shot, [&] { return source; }, epoch, cta);
    if (ok && data_of(header) != message.fingerprint) {
      fail(self, FailureKind::mismatch, Step::one_shot, source, epoch, cta);
      ok = false;
    }
  }
  return ok;
}

// The value, but the compiler does not know that it never changes. So it computes dependent values where they are
// needed, and not ahead of a loop, where they would occupy registers all along.
JAX_RING_TEAM uint32_t unknown(uint32_t value) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// Waits for some peers' packs at one place. All lines are loaded before any is tested, so that their latencies overlap.
template <int kCount>
JAX_RING_TEAM bool receive(const Endpoint& self, int first, uint32_t place, int cta, uint32_t epoch,
                           PeerPacks<kCount>* packs) {
  Line* const from_rank_0 = lines(self, self.rank, cta, 0, epoch) + line_of_pack(place);
  const uint32_t lines_per_rank = static_cast<uint32_t>(self.capacity.num_lines());
  const auto exists = [&](int i) { return first + i < self.num_ranks() - 1; };
  const auto line = [&](int i, uint32_t stride) { return from_rank_0 + stride * place_of_peer(first + i, self.rank); };
  const auto is_ready = [&] {
    const uint32_t stride = unknown(lines_per_rank);
    Line received[kCount][2] = {};
    JAX_RING_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (!exists(i)) continue;
      received[i][0] = load_line(line(i, stride));
      received[i][1] = load_line<kPacksPerGroup>(line(i, stride));
    }
    bool complete = true;
    JAX_RING_UNROLL
    for (int i = 0; i < kCount; ++i) {
      packs->pack[i] = {{data_of(received[i][0]), data_of(received[i][1])}};
      complete = complete && (!exists(i) || (has_tag(received[i][0], epoch) && has_tag(received[i][1], epoch)));
    }
    return complete;
  };
  const auto missing = [&] {
    const auto has_arrived = [&](int i) {
      Line* from = line(i, lines_per_rank);
      return has_tag(load_line(from), epoch) && has_tag(load_line<kPacksPerGroup>(from), epoch);
    };
    int i = 0;
    JAX_RING_NO_UNROLL
    while (exists(i + 1) && has_arrived(i)) ++i;
    return place_of_peer(first + i, self.rank);
  };
  return await(self, is_ready, Step::one_shot, missing, epoch, cta);
}

// Receives the pieces of some terms of a tree, at one place of the result: part `part` of their packs.
template <class Element>
JAX_RING_TEAM bool receive_terms(const Endpoint& self, const TreeProgram& program, int first, int part, uint32_t place,
                                 uint32_t packs_per_slot, int cta, uint32_t epoch, Pieces<Element>* terms) {
  constexpr int kCount = kTermsInFlight<Element>, kWords = kPieceWords<Element>;
  Line* const from_rank_0 = lines(self, self.rank, cta, 0, epoch) + part * kPacksPerGroup;
  const uint32_t lines_per_rank = static_cast<uint32_t>(self.capacity.num_lines());
  const auto line = [&](int i, uint32_t per_rank) {
    const uint32_t in_round = packs_per_slot * program.slot(first + i) + place;
    return from_rank_0 + (per_rank * program.member(first + i) + line_of_pack(in_round));
  };
  const auto is_ready = [&] {
    const uint32_t stride = unknown(lines_per_rank);
    Line received[kCount][kWords] = {};
    JAX_RING_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (!program.exists(first + i)) continue;
      received[i][0] = load_line(line(i, stride));
      if constexpr (kWords == 2) received[i][1] = load_line<kPacksPerGroup>(line(i, stride));
    }
    bool complete = true;
    JAX_RING_UNROLL
    for (int i = 0; i < kCount; ++i) {
      JAX_RING_UNROLL
      for (int word = 0; word < kWords; ++word) {
        terms->piece[i].word[word] = data_of(received[i][word]);
        complete = complete && (!program.exists(first + i) || has_tag(received[i][word], epoch));
      }
    }
    return complete;
  };
  const auto missing = [&] {
    int source = self.rank;
    JAX_RING_NO_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (!program.exists(first + i)) continue;
      Line* from = line(i, lines_per_rank);
      bool has_arrived = has_tag(load_line(from), epoch);
      if constexpr (kWords == 2) has_arrived = has_arrived && has_tag(load_line<kPacksPerGroup>(from), epoch);
      source = program.member(first + i);
      if (!has_arrived) break;
    }
    return source;
  };
  return await(self, is_ready, Step::one_shot, missing, epoch, cta);
}

// Sends this rank's packs and folds those of all ranks, one at a time: a thread has at most one in a round, if it is
// one of a GPU's.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool exchange(const Endpoint& self, const Message& message, PackRange range, int cta, Team team,
                            uint32_t epoch, Op op, const RankTerms&) {
  bool ok = true;
  for_each_small_pack<1>(
      message, RangeWalk{range}, team,
      [](const auto& operand, uint64_t index, const Spot&) { return operand.load(index); },
      [&](const auto& operand, uint64_t index, const Spot& spot, Pack mine) {
        if (ok) send<RankTerms::kFirstStep>(self, spot.place, mine, cta, epoch);
        const auto load = [&](int first) {
          PeerPacks<kPeersInFlight<Element>> packs{};
          if (ok) ok = receive(self, first, spot.place, cta, epoch, &packs);
          return packs;
        };
        operand.store(index, fold_packs<Element>(self.num_ranks(), self.rank, mine, load(0), load, op));
      });
  return ok;
}

// Exchanges along a tree, where a rank sends its packs to itself as well.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool exchange(const Endpoint& self, const Message& message, PackRange range, int cta, Team team,
                            uint32_t epoch, Op op, const TreeTerms& terms) {
  const uint32_t packs_per_slot = static_cast<uint32_t>(range.size());
  bool ok = true;
  for_each_small_pack<1>(
      message, RangeWalk{range}, team, [](const auto&, uint64_t, const Spot&) { return 0; },
      [&](const auto& operand, uint64_t index, const Spot& spot, int) {
        JAX_RING_NO_UNROLL
        for (int slot = 0; ok && slot < terms.num_slots(); ++slot) {
          send<TreeTerms::kFirstStep>(self, slot * packs_per_slot + spot.place, operand.load(index, slot), cta, epoch);
        }
        const auto load = [&](int first, int part) {
          Pieces<Element> pieces{};
          if (ok) {
            ok = receive_terms<Element>(self, terms.program, first, part, spot.place, packs_per_slot, cta, epoch,
                                        &pieces);
          }
          return pieces;
        };
        operand.store(index, fold_tree<Element>(terms.program, 0, load, op));
      });
  return ok;
}

// All-reduces the team's share of the message, and counts its rounds in *last_epoch. Returns false if a wait failed;
// the rank's failure record names the peer.
template <class Element, class Op, class Team, class Terms = RankTerms>
JAX_RING_TEAM bool all_reduce(const Endpoint& self, const Message& message, int cta, Team team, uint32_t* last_epoch,
                              Op op, const Terms& terms = {}) {
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  const uint32_t round_packs = static_cast<uint32_t>(self.capacity.one_shot_packs / terms.num_slots());
  uint32_t epoch = *last_epoch;
  bool ok = true;
  JAX_RING_NO_UNROLL
  for (PackRange rest = share; ok && rest.begin < rest.end; rest.begin += round_packs) {
    ++epoch;
    const PackRange range{rest.begin, smaller(rest.begin + round_packs, rest.end)};
    announce(self, message, range, cta, team, epoch, terms);
    ok = check_headers(self, message, cta, team, epoch);
    ok = exchange<Element>(self, message, range, cta, team, epoch, op, terms) && ok;
    // A thread without work in the next round must not announce it while another thread still reads this one.
    ok = team.all(ok);
  }
  if (ok) *last_epoch = epoch;
  return ok;
}

}  // namespace one_shot
}  // namespace jax_ring
