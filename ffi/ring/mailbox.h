// mailbox.h: the memory of a rank that its peers write into, and where in it everything lies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ring/pack.h"

namespace jax_ring {

// Flags of different writers are this far apart, so that no two of them share a cache line.
constexpr size_t kFlagBytes = 128;

// A line of the one-shot algorithm: 4 bytes of data and 4 of tag in each word. A word is written at once or not at all,
// so whoever finds the tag of this call in it has its data as well, and needs no flag.
struct alignas(16) Line {
  uint64_t word[2];
};

constexpr uint64_t kLinesPerPack = 2;

// What a rank announces by a flag. The first two have a flag for each peer, the others one for the neighbour.
enum class FlagKind : int {
  scattered,  // the peer's values for my part of the message are here
  gathered,   // the peer's part of the result is here
  tail,       // the previous rank has put so many items into my slots
  head,       // the next rank has taken so many items out of its slots
};

// The sizes that all ranks of a group agree on. Work is split over `num_ctas` teams, each with a mailbox of its own
// within the mailbox: a team waits only for the teams of its own number.
struct Capacity {
  int num_ranks;
  int num_ctas;
  uint64_t one_shot_packs;  // of one rank's message, in each round
  uint64_t part_packs;      // of one rank's part of a two-shot round
  uint64_t slot_packs;      // of one slot of the ring
  uint64_t num_slots;       // of the ring; a power of two, so that counting them survives a wrap-around

  JAX_RING_INLINE size_t flags_bytes() const {
    return static_cast<size_t>(num_ctas) * (2 * static_cast<size_t>(num_ranks) + 2) * kFlagBytes;
  }

  JAX_RING_INLINE size_t flag(FlagKind kind, int cta, int peer) const {
    const size_t per_cta = 2 * static_cast<size_t>(num_ranks) + 2;
    size_t index = 0;
    switch (kind) {
      case FlagKind::scattered:
        index = peer;
        break;
      case FlagKind::gathered:
        index = num_ranks + peer;
        break;
      case FlagKind::tail:
        index = 2 * num_ranks;
        break;
      case FlagKind::head:
        index = 2 * num_ranks + 1;
        break;
    }
    return (cta * per_cta + index) * kFlagBytes;
  }

  // One-shot: the lines from `source`, a header first. Two sets take turns.
  JAX_RING_INLINE uint64_t num_lines() const { return 1 + kLinesPerPack * one_shot_packs; }
  JAX_RING_INLINE size_t lines(int parity, int cta, int source) const {
    const size_t set = (static_cast<size_t>(parity) * num_ctas + cta) * num_ranks + source;
    return flags_bytes() + set * num_lines() * sizeof(Line);
  }
  JAX_RING_INLINE size_t lines_end() const { return lines(2, 0, 0); }

  // Two-shot: what `source` sent of my part, and the result of the part that `source` owns.
  JAX_RING_INLINE size_t scatter(int cta, int source) const {
    return lines_end() + (static_cast<size_t>(cta) * num_ranks + source) * part_packs * kPackBytes;
  }
  JAX_RING_INLINE size_t gather(int cta, int source) const { return scatter(num_ctas + cta, source); }
  JAX_RING_INLINE size_t gather_end() const { return scatter(2 * num_ctas, 0); }

  // Ring: slots that the previous rank fills in turn, each with a pack in front that says whose it is.
  JAX_RING_INLINE size_t slot(int cta, uint64_t index) const {
    return gather_end() + (cta * num_slots + index) * (1 + slot_packs) * kPackBytes;
  }

  // Of one whole mailbox.
  JAX_RING_INLINE size_t bytes() const { return slot(num_ctas, 0); }
};

}  // namespace jax_ring
