// one_shot.h: all-reduce of small messages in one step: every rank sends its message to all ranks, and folds all of
// them.
//
// Data and the tag of the round travel in the same words (as in NCCL's LL protocol), so there is no flag to wait for
// and no fence: p-1 sends and a poll. Two sets of lines alternate. A rank rewrites a set two rounds later, when it has
// finished the round in between, for which every peer sent its data only after reading this set.
#pragma once

#include "ring/fold_pack.h"
#include "ring/signal.h"

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

// Sends this rank's packs and two more lines. One is the header, which identifies the call. The other is a line that
// this round does not use, a different one each round, so that no line keeps its tag until the epochs wrap around.
template <class Team>
JAX_RING_TEAM void send(const Endpoint& self, const Message& message, PackRange range, int cta, Team team,
                        uint32_t epoch) {
  const int p = self.num_ranks();
  const uint64_t swept = epoch / 2 % self.capacity.num_lines();
  for (int step = 1; step < p; ++step) {
    Line* to = lines(self, (self.rank + step) % p, cta, self.rank, epoch);
    if (team.thread() == 0) {
      store_line(to, tagged(message.fingerprint, epoch));
      if (swept > kLinesPerPack * range.size()) store_line(to + swept, tagged(0, epoch));
    }
  }
  for_each_pack<1>(
      message, RangeWalk{range}, team,
      [](const Operand& operand, uint64_t index, const Spot&) { return input_pack(operand, index); },
      [&](const Operand&, uint64_t, const Spot& spot, Pack pack) {
        for (int step = 1; step < p; ++step) {
          Line* to = lines(self, (self.rank + step) % p, cta, self.rank, epoch) + 1 + kLinesPerPack * spot.place;
          store_line(to, tagged(pack.word[0], epoch));
          store_line(to + 1, tagged(pack.word[1], epoch));
        }
      });
}

// Waits for the pack in these lines.
JAX_RING_TEAM bool receive(const Endpoint& self, Line* from, int source, int cta, uint32_t epoch, Pack* pack) {
  Line low, high;
  const bool ok = await(
      self,
      [&] {
        low = load_line(from);
        high = load_line(from + 1);
        return has_tag(low, epoch) && has_tag(high, epoch);
      },
      Step::one_shot, source, epoch, cta);
  *pack = {{data_of(low), data_of(high)}};
  return ok;
}

// Whether every peer makes the same call.
template <class Team>
JAX_RING_TEAM bool check_headers(const Endpoint& self, const Message& message, int cta, Team team, uint32_t epoch) {
  bool ok = true;
  for (int source = team.thread(); source < self.num_ranks(); source += team.size()) {
    if (source == self.rank) continue;
    Line header;
    ok = ok && await(
                   self,
                   [&] {
                     header = load_line(lines(self, self.rank, cta, source, epoch));
                     return has_tag(header, epoch);
                   },
                   Step::one_shot, source, epoch, cta);
    if (ok && data_of(header) != message.fingerprint) {
      fail(self, FailureKind::mismatch, Step::one_shot, source, epoch, cta);
      ok = false;
    }
  }
  return ok;
}

// Folds the packs of all ranks into the output.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool fold(const Endpoint& self, const Message& message, PackRange range, int cta, Team team,
                        uint32_t epoch, Op op) {
  bool ok = true;
  for_each_pack<1>(
      message, RangeWalk{range}, team,
      [](const Operand& operand, uint64_t index, const Spot&) { return input_pack(operand, index); },
      [&](const Operand& operand, uint64_t index, const Spot& spot, Pack mine) {
        const Pack result = fold_packs<Element>(
            self.num_ranks(),
            [&](int source) {
              Pack pack = mine;
              Line* from = lines(self, self.rank, cta, source, epoch) + 1 + kLinesPerPack * spot.place;
              if (source != self.rank && ok) ok = receive(self, from, source, cta, epoch, &pack);
              return pack;
            },
            op);
        output_pack(operand, index, result);
      });
  return ok;
}

// All-reduces the team's share of the message. Returns false if a wait failed; the rank's failure record names the
// peer.
template <class Element, class Op, class Team>
JAX_RING_TEAM bool all_reduce(const Endpoint& self, const Message& message, int cta, Team team, Op op) {
  Progress& progress = self.progress[cta];
  uint32_t epoch = progress.one_shot_epoch;
  const PackRange share = share_of({0, message.num_packs}, cta, self.capacity.num_ctas);
  bool ok = true;
  for (uint64_t begin = share.begin; ok && begin < share.end; begin += self.capacity.one_shot_packs) {
    ++epoch;
    const PackRange range{begin, smaller(begin + self.capacity.one_shot_packs, share.end)};
    send(self, message, range, cta, team, epoch);
    ok = check_headers(self, message, cta, team, epoch);
    ok = fold<Element>(self, message, range, cta, team, epoch, op) && ok;
    // A thread without work in the next round must not announce it while another thread still reads this one.
    ok = team.all(ok);
  }
  if (ok && team.thread() == 0) progress.one_shot_epoch = epoch;
  return ok;
}

}  // namespace one_shot
}  // namespace jax_ring
