// pack.h: messages in packs of 16 bytes, the unit in which ranks send them: many operands, any size, any alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "collective/element.h"
#include "collective/options.h"
#include "collective/watch.h"
#include "device/memory/team.h"

namespace jax_ring {

struct alignas(16) Pack {
  uint64_t word[2];
};

static_assert(sizeof(Pack) == kPackBytes);

template <class Element>
constexpr int kPerPack = static_cast<int>(kPackBytes / sizeof(typename Element::Storage));

// One operand of a message on one rank. Its packs follow those of the previous operands; the last one is padded. In
// collectives with one block per rank, `bytes` is the size of a block, and the blocks are contiguous.
struct Operand {
  const unsigned char* input;
  unsigned char* output;  // may be `input`
  uint64_t bytes;
  uint64_t first_pack;
};

// Limited by the space for kernel arguments on every GPU.
constexpr int kMaxOperands = 64;

// One rank's side of a call. Everything but the addresses is the same on all ranks.
struct Message {
  uint64_t num_packs;
  uint32_t num_operands;
  uint32_t fingerprint;  // very likely differs between mismatched calls
  Route route;           // of a permutation
  uint32_t num_blocks;   // of each operand, or of its result
  uint64_t flipped;      // bits of the values, by MaxOfFlipped
  Operand operands[kMaxOperands];
};

// Packs [begin, end).
struct PackRange {
  uint64_t begin, end;

  JAX_RING_INLINE uint64_t size() const { return end > begin ? end - begin : 0; }
};

JAX_RING_INLINE uint64_t ceil_div(uint64_t a, uint64_t b) {
  // A 64-bit division takes a GPU a hundred instructions.
  if ((a + b) >> 32 == 0) return (static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b);
  return (a + b - 1) / b;
}
JAX_RING_INLINE uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// The share of worker `index` of `parts` in `range`. Shares are contiguous and of equal size, except for the last ones.
JAX_RING_INLINE PackRange share_of(PackRange range, uint64_t index, uint64_t parts) {
  const uint64_t each = ceil_div(range.size(), parts);
  const uint64_t begin = smaller(range.begin + index * each, range.end);
  return {begin, smaller(begin + each, range.end)};
}

JAX_RING_INLINE bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0; }

// A pack that its buffer holds only in part, or not at a multiple of the pack size. Out of line, since it is rare.
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

// An operand whose used packs can all be loaded and stored whole.
struct WholeOperand {
  const unsigned char* input;
  unsigned char* output;
  uint64_t bytes;  // of a block

  JAX_RING_TEAM Pack load(uint64_t index, int block = 0) const {
    const unsigned char* from = input + (block * bytes + index * kPackBytes);
    watch_read(from, kPackBytes);
    return *reinterpret_cast<const Pack*>(from);
  }
  JAX_RING_TEAM void store(uint64_t index, Pack pack, int block = 0) const {
    unsigned char* to = output + (block * bytes + index * kPackBytes);
    watch_write(to, kPackBytes);
    *reinterpret_cast<Pack*>(to) = pack;
  }
};

// An operand of a message, and its packs there. The fields needed for each pack stay in registers.
struct OperandView {
  const Message& message;
  uint32_t number;
  uint64_t begin, end;  // its packs
  uint64_t whole;       // packs that can be loaded and stored in one piece

  JAX_RING_TEAM explicit OperandView(const Message& all) : message(all) { enter(0); }
  JAX_RING_TEAM void enter(uint32_t i) {
    const Operand& operand = message.operands[i];
    number = i;
    begin = operand.first_pack;
    end = begin + ceil_div(operand.bytes, kPackBytes);
    whole = is_aligned(operand.input) && is_aligned(operand.output) ? operand.bytes / kPackBytes : 0;
  }

  // Finds the operand of a pack. A thread visits nearly all packs in order, so it seldom searches for long.
  JAX_RING_TEAM void find(uint64_t pack) {
    if (pack < begin) enter(0);
    JAX_RING_NO_UNROLL
    while (pack >= end) enter(number + 1);
  }

  JAX_RING_TEAM bool is_whole(uint64_t index, int block) const {
    return index < whole && (block == 0 || message.operands[number].bytes % kPackBytes == 0);
  }
  // Whether it has all these packs, in all blocks, and whole. It has the first one.
  JAX_RING_TEAM bool is_whole(PackRange packs) const {
    return packs.end <= begin + whole && is_whole(packs.begin - begin, message.num_blocks == 1 ? 0 : 1);
  }
  JAX_RING_TEAM WholeOperand as_whole() const {
    const Operand& operand = message.operands[number];
    return {operand.input, operand.output, operand.bytes};
  }

  // The index-th pack of the operand, or of one of its blocks, padded with zeros past the end.
  JAX_RING_TEAM Pack load(uint64_t index, int block = 0) const {
    const Operand& operand = message.operands[number];
    const unsigned char* from = operand.input + block * operand.bytes + index * kPackBytes;
    watch_read(from, smaller(operand.bytes - index * kPackBytes, kPackBytes));
    if (is_whole(index, block)) return *reinterpret_cast<const Pack*>(from);
    return load_odd_pack(from, smaller(operand.bytes - index * kPackBytes, kPackBytes));
  }
  // Writes the index-th pack of the result, up to its end.
  JAX_RING_TEAM void store(uint64_t index, Pack pack, int block = 0) const {
    const Operand& operand = message.operands[number];
    unsigned char* to = operand.output + block * operand.bytes + index * kPackBytes;
    watch_write(to, smaller(operand.bytes - index * kPackBytes, kPackBytes));
    if (is_whole(index, block)) {
      *reinterpret_cast<Pack*>(to) = pack;
    } else {
      store_odd_pack(to, smaller(operand.bytes - index * kPackBytes, kPackBytes), pack);
    }
  }
};

// Packs that a thread copies at a time: loads in flight hide the latency of GPU memory.
constexpr int kCopiesInFlight = 4;

// A pack of a message, its place in a mailbox's buffer, and the rank that owns its part, if any.
struct Spot {
  uint64_t pack;
  uint32_t place;
  int owner;
};

// A walk is a list of packs of a range, for the threads of a team. visit<kCount>(team, visitor) calls the visitor with
// up to kCount packs of this thread at a time, and says for each whether there is one. This walk is the range itself.
struct RangeWalk {
  PackRange range;
  int owner = 0;

  JAX_RING_TEAM PackRange packs() const { return range; }

  template <int kCount, class Team, class Visitor>
  JAX_RING_TEAM void visit(Team team, Visitor visitor) const {
    const uint32_t size = static_cast<uint32_t>(range.size()), threads = team.size();
    JAX_RING_NO_UNROLL
    for (uint32_t at = team.thread(); at < size; at += kCount * threads) {
      Spot spots[kCount];
      bool exists[kCount];
      JAX_RING_UNROLL
      for (int u = 0; u < kCount; ++u) {
        const uint32_t place = at + u * threads;
        spots[u] = {range.begin + place, place, owner};
        exists[u] = place < size;
      }
      visitor(spots, exists);
    }
  }
};

// Visits the packs of a walk: store(operand, index, spot, value) receives the result of load(operand, index, spot),
// where `index` counts from the start of the operand. A thread loads up to kInFlight packs before it stores them. Small
// operands leave no thread without work: each finds the operands of its own packs.
template <int kInFlight, class Walk, class Team, class Load, class Store>
JAX_RING_TEAM void for_each_small_pack(const Message& message, const Walk& walk, Team team, Load load, Store store) {
  OperandView operand(message);
  walk.template visit<kInFlight>(team, [&](const Spot* spots, const bool* exists) {
    // Initialize them, or their registers would be occupied from the start of the kernel.
    decltype(load(operand, uint64_t{}, Spot{})) values[kInFlight] = {};
    uint32_t numbers[kInFlight] = {};
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      if (!exists[u]) continue;
      operand.find(spots[u].pack);
      numbers[u] = operand.number;
      values[u] = load(operand, spots[u].pack - operand.begin, spots[u]);
    }
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      if (!exists[u]) continue;
      if (operand.number != numbers[u]) operand.enter(numbers[u]);
      store(operand, spots[u].pack - operand.begin, spots[u], values[u]);
    }
  });
}

// Visits the packs of messages of any size. Nearly all packs of a large message are in walks within one operand, which
// need no search per pack. Loading the code for both takes some tenths of a microsecond.
template <int kInFlight, class Walk, class Team, class Load, class Store>
JAX_RING_TEAM void for_each_pack(const Message& message, const Walk& walk, Team team, Load load, Store store) {
  if (walk.packs().size() == 0) return;
  OperandView operand(message);
  operand.find(walk.packs().begin);
  if (!operand.is_whole(walk.packs())) return for_each_small_pack<kInFlight>(message, walk, team, load, store);
  const WholeOperand whole = operand.as_whole();
  const uint64_t begin = operand.begin;
  walk.template visit<kInFlight>(team, [&](const Spot* spots, const bool* exists) {
    decltype(load(whole, uint64_t{}, Spot{})) values[kInFlight] = {};
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      if (exists[u]) values[u] = load(whole, spots[u].pack - begin, spots[u]);
    }
    JAX_RING_UNROLL
    for (int u = 0; u < kInFlight; ++u) {
      if (exists[u]) store(whole, spots[u].pack - begin, spots[u], values[u]);
    }
  });
}

// Fills a part of the outputs with copies of one pack.
template <class Team>
JAX_RING_TEAM void fill(const Message& message, PackRange range, int block, Team team, Pack value) {
  for_each_small_pack<1>(
      message, RangeWalk{range}, team, [&](const auto&, uint64_t, const Spot&) { return value; },
      [&](const auto& operand, uint64_t index, const Spot&, Pack pack) { operand.store(index, pack, block); });
}

}  // namespace jax_ring
