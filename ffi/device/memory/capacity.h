// capacity.h: the amount of memory for a group's mailboxes, and the number of teams per call.
#pragma once

#include "collective/options.h"
#include "device/memory/endpoint.h"

namespace jax_ring {

// Teams per call: CTAs on a GPU, each on a multiprocessor of its own. An H100 has 132 multiprocessors and an A100 has
// 108; the rest runs the program's other work.
constexpr int kTeams = 32;
constexpr int kThreadsPerCta = 512;

// The mailbox sizes for a group of this many ranks. A mailbox has 25 to 31 MiB, whatever the number of ranks.
inline Capacity default_capacity(int num_ranks) {
  Capacity capacity{};
  capacity.num_ranks = num_ranks;
  capacity.num_ctas = kTeams;
  // One-shot: a round takes any message up to the default threshold, so that small messages are exchanged once, but at
  // most one pack per thread, with a thread left for each peer's header.
  const uint64_t packs = ceil_div(default_thresholds(num_ranks).one_shot, kPackBytes);
  const uint64_t each = smaller(ceil_div(packs, kTeams), kThreadsPerCta - kMaxRanks);
  capacity.one_shot_packs = each > 16 ? each : 16;
  // Two-shot: a team's round is 128 KiB of the message. Smaller rounds need more fences, larger ones more memory.
  capacity.part_packs = 8192 / num_ranks;
  // Ring: results follow the partial folds at a distance of all slots but one. To keep all links busy, a chain needs
  // one chunk in flight per rank. A link holds 128 KiB of each team in flight.
  capacity.num_slots = num_ranks <= 8 ? 8 : num_ranks <= 16 ? 16 : num_ranks <= 32 ? 32 : 64;
  capacity.slot_packs = 8192 / capacity.num_slots;
  return capacity;
}

}  // namespace jax_ring
