// pack.h: messages in packs of 16 bytes, the unit in which ranks send them: many operands, any size, any alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "ring/element.h"
#include "ring/options.h"
#include "ring/team.h"

namespace jax_ring {

struct alignas(16) Pack {
  uint64_t word[2];
};

static_assert(sizeof(Pack) == kPackBytes);

template <class Element>
constexpr int kPerPack = static_cast<int>(kPackBytes / sizeof(typename Element::Storage));

// One operand of a message on one rank. Its packs follow those of the operands before it; the last one is padded. In
// collectives with one block per rank, `bytes` is the size of a block, and the blocks are contiguous.
struct Operand {
  const unsigned char* input;
  unsigned char* output;  // may be `input`
  uint64_t bytes;
  uint64_t first_pack;
};

// Limited by the space for kernel arguments that every GPU has.
constexpr int kMaxOperands = 64;

// One rank's side of a call. All but the addresses is the same on all ranks.
struct Message {
  uint64_t num_packs;
  uint32_t num_operands;
  uint32_t fingerprint;  // very likely differs between calls that do not match
  Operand operands[kMaxOperands];
};

// Packs [begin, end).
struct PackRange {
  uint64_t begin, end;

  JAX_RING_INLINE uint64_t size() const { return end > begin ? end - begin : 0; }
};

JAX_RING_INLINE uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
JAX_RING_INLINE uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// The share of worker `index` of `parts` in `range`. Shares are contiguous and of equal size, except for the last ones.
JAX_RING_INLINE PackRange share_of(PackRange range, uint64_t index, uint64_t parts) {
  const uint64_t each = ceil_div(range.size(), parts);
  const uint64_t begin = smaller(range.begin + index * each, range.end);
  return {begin, smaller(begin + each, range.end)};
}

JAX_RING_INLINE bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0; }

// A pack that its buffer holds only a part of, or not at a multiple of the pack size. Out of line, since it is rare.
JAX_RING_TEAM_CALL Pack load_odd_pack(const unsigned char* from, uint64_t valid) {
  Pack pack{};
  JAX_RING_UNROLL
  for (uint64_t i = 0; i < kPackBytes; ++i) {
    if (i < valid) pack.word[i / 8] |= uint64_t{from[i]} << (8 * (i % 8));
  }
  return pack;
}
JAX_RING_TEAM_CALL void store_odd_pack(unsigned char* to, uint64_t valid, Pack pack) {
  JAX_RING_UNROLL
  for (uint64_t i = 0; i < kPackBytes; ++i) {
    if (i < valid) to[i] = static_cast<unsigned char>(pack.word[i / 8] >> (8 * (i % 8)));
  }
}

// The index-th pack of a buffer of `bytes` bytes, padded with zeros past the end.
JAX_RING_TEAM Pack load_pack(const unsigned char* buffer, uint64_t bytes, uint64_t index) {
  const unsigned char* from = buffer + index * kPackBytes;
  const uint64_t valid = smaller(bytes - index * kPackBytes, kPackBytes);
  if (valid == kPackBytes && is_aligned(buffer)) return *reinterpret_cast<const Pack*>(from);
  return load_odd_pack(from, valid);
}

// Writes the index-th pack of a buffer of `bytes` bytes, up to its end.
JAX_RING_TEAM void store_pack(unsigned char* buffer, uint64_t bytes, uint64_t index, Pack pack) {
  unsigned char* to = buffer + index * kPackBytes;
  const uint64_t valid = smaller(bytes - index * kPackBytes, kPackBytes);
  if (valid == kPackBytes && is_aligned(buffer)) {
    *reinterpret_cast<Pack*>(to) = pack;
  } else {
    store_odd_pack(to, valid, pack);
  }
}

// Packs that a thread copies at a time: loads in flight hide the latency of GPU memory.
constexpr int kCopiesInFlight = 4;

// A pack of a message, its place in the buffer of a mailbox, and the rank whose part it belongs to, if any.
struct Spot {
  uint64_t pack;
  uint64_t place;
  int owner;
};

// A walk is a numbered list of packs to visit, in which some numbers may be empty. This one visits a range.
struct RangeWalk {
  PackRange range;

  JAX_RING_TEAM uint64_t size() const { return range.size(); }
  // The i-th pack. False if there is none of this number.
  JAX_RING_TEAM bool get(uint64_t i, Spot* spot) const {
    *spot = {range.begin + i, i, 0};
    return true;
  }
};

// Finds the operand of a pack. A thread visits nearly all packs in order, so that it seldom searches for long.
struct OperandFinder {
  const Message& message;
  uint32_t operand;
  uint64_t begin, end;  // its packs

  JAX_RING_TEAM explicit OperandFinder(const Message& all) : message(all) { enter(0); }
  JAX_RING_TEAM void enter(uint32_t i) {
    operand = i;
    begin = message.operands[i].first_pack;
    end = begin + ceil_div(message.operands[i].bytes, kPackBytes);
  }
  JAX_RING_TEAM void find(uint64_t pack) {
    if (pack < begin) enter(0);
    while (pack >= end) enter(operand + 1);
  }
};

// Visits the packs of a walk: store(operand, index, spot, value) receives the result of load(operand, index, spot),
// where `index` counts from the start of the operand. Each thread loads kInFlight packs before it stores them. All
// threads have work even if operands or parts are small: the walk does not stop between them.
template <int kInFlight, class Walk, class Team, class Load, class Store>
JAX_RING_TEAM void for_each_pack(const Message& message, const Walk& walk, Team team, Load load, Store store) {
  OperandFinder finder(message);
  const uint64_t size = walk.size(), stride = team.size();
  JAX_RING_NO_UNROLL
  for (uint64_t at = team.thread(); at < size; at += kInFlight * stride) {
    decltype(load(message.operands[0], uint64_t{}, Spot{})) values[kInFlight];
    bool exists[kInFlight];
    uint32_t operands[kInFlight];
    uint64_t indices[kInFlight];
    Spot spots[kInFlight];
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      const uint64_t i = at + u * stride;
      exists[u] = i < size && walk.get(i, &spots[u]);
      if (!exists[u]) continue;
      finder.find(spots[u].pack);
      operands[u] = finder.operand;
      indices[u] = spots[u].pack - finder.begin;
      values[u] = load(message.operands[operands[u]], indices[u], spots[u]);
    }
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      if (exists[u]) store(message.operands[operands[u]], indices[u], spots[u], values[u]);
    }
  }
}

// Load and store functions for operands.
JAX_RING_TEAM Pack input_pack(const Operand& operand, uint64_t index, int block = 0) {
  return load_pack(operand.input + block * operand.bytes, operand.bytes, index);
}
JAX_RING_TEAM void output_pack(const Operand& operand, uint64_t index, Pack pack, int block = 0) {
  store_pack(operand.output + block * operand.bytes, operand.bytes, index, pack);
}

// Fills a part of the outputs with copies of one pack.
template <class Team>
JAX_RING_TEAM void fill(const Message& message, PackRange range, int block, Team team, Pack value) {
  for_each_pack<1>(
      message, RangeWalk{range}, team, [&](const Operand&, uint64_t, const Spot&) { return value; },
      [&](const Operand& operand, uint64_t index, const Spot&, Pack pack) {
        output_pack(operand, index, pack, block);
      });
}

}  // namespace jax_ring
