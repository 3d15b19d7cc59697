// mailbox.h: the memory of a rank that its peers write into, and its layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/memory/pack.h"

namespace jax_ring {

// A rank may free its mailbox only when the last calls of all its peers have ended: it does not wait for all of their
// writes, and some may arrive after its own last call. In one-shot that is the line that a round sweeps, in the ring
// the flag `head`, with which the next rank frees a slot. (Two-shot waits for all writes.) A failed call waits for
// nothing. So before freeing the memory, each rank waits for its own kernels, and then all ranks wait for each other.
// After a failure they cannot, so memory that others may still reach is better kept.

// Distance between the flags of different writers, so that no two share a cache line.
constexpr size_t kFlagBytes = 128;

// A line of the one-shot algorithm: each word holds 4 bytes of data and 4 of tag. Words are written atomically, so a
// reader that sees this call's tag has the data as well, and needs no flag.
struct alignas(16) Line {
  uint64_t word[2];
};

// A pack has two lines, kPacksPerGroup apart: a warp's stores of one of them are next to each other, and fill sectors.
constexpr uint32_t kPacksPerGroup = 32;

JAX_RING_INLINE uint32_t line_of_pack(uint32_t place) { return place + (place & ~(kPacksPerGroup - 1)); }
JAX_RING_INLINE uint32_t pack_of_line(uint32_t line) {
  return line / (2 * kPacksPerGroup) * kPacksPerGroup + line % kPacksPerGroup;
}

// The meaning of a flag. The first two exist once per peer, the others once, for the neighbor.
enum class FlagKind : int {
  even,  // number of the peer's last even two-shot step
  odd,   // number of the peer's last odd two-shot step
  tail,  // number of items that the previous rank has put into this rank's slots
  head,  // number of items that the next rank has taken out of its slots
};

// Buffers of the two-shot algorithm, used by its rounds in turn. See two_shot.h for why these numbers suffice.
constexpr int kScatterBuffers = 3;
constexpr int kGatherBuffers = 2;

// The sizes that a group's ranks agree on. `num_ctas` teams share the work, each with its own section of the mailbox: a
// team waits only for teams with its own index.
struct Capacity {
  int num_ranks;
  int num_ctas;
  uint64_t one_shot_packs;  // of one rank's message, in each round
  uint64_t part_packs;      // of one rank's part of a two-shot round
  uint64_t slot_packs;      // of one slot of the ring
  uint64_t num_slots;       // of the ring; a power of two, so that slot indices survive a wrap-around of the counters

  JAX_RING_INLINE size_t flags_bytes() const {
    return static_cast<size_t>(num_ctas) * (2 * static_cast<size_t>(num_ranks) + 2) * kFlagBytes;
  }

  JAX_RING_INLINE size_t flag(FlagKind kind, int cta, int peer) const {
    const size_t per_cta = 2 * static_cast<size_t>(num_ranks) + 2;
    size_t index = 0;
    switch (kind) {
      case FlagKind::even:
        index = peer;
        break;
      case FlagKind::odd:
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

  // One-shot: the lines from `source`: those of its packs, and the last one, the header. Sets start at multiples of 128
  // bytes. Two alternate.
  JAX_RING_INLINE uint64_t num_lines() const {
    return 8 + 2 * ((one_shot_packs + kPacksPerGroup - 1) & ~uint64_t{kPacksPerGroup - 1});
  }
  JAX_RING_INLINE uint64_t header() const { return num_lines() - 1; }
  JAX_RING_INLINE size_t lines(int parity, int cta, int source) const {
    const size_t set = (static_cast<size_t>(parity) * num_ctas + cta) * num_ranks + source;
    return flags_bytes() + set * num_lines() * sizeof(Line);
  }
  JAX_RING_INLINE size_t lines_end() const { return lines(2, 0, 0); }

  // Two-shot: the values that `source` sent for this rank's part, and the result of the part owned by `source`.
  JAX_RING_INLINE size_t scatter(int buffer, int cta, int source) const {
    const size_t part = (static_cast<size_t>(buffer) * num_ctas + cta) * num_ranks + source;
    return lines_end() + part * part_packs * kPackBytes;
  }
  JAX_RING_INLINE size_t gather(int buffer, int cta, int source) const {
    return scatter(kScatterBuffers + buffer, cta, source);
  }
  JAX_RING_INLINE size_t gather_end() const { return gather(kGatherBuffers, 0, 0); }

  // Ring: slots that the previous rank fills in turn, each preceded by a pack with its call's fingerprint.
  JAX_RING_INLINE size_t slot(int cta, uint64_t index) const {
    return gather_end() + (cta * num_slots + index) * (1 + slot_packs) * kPackBytes;
  }

  JAX_RING_INLINE size_t bytes() const { return slot(num_ctas, 0); }
};

}  // namespace jax_ring
