// pack.h: messages in packs of 16 bytes, the unit in which ranks send them: many operands, any size, any alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "ring/element.h"
#include "ring/options.h"
#include "ring/team.h"
#include "ring/watch.h"

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

// The index-th pack of a buffer of `bytes` bytes, padded with zeros past the end.
JAX_RING_INLINE Pack load_pack(const unsigned char* buffer, uint64_t bytes, uint64_t index) {
  const unsigned char* from = buffer + index * kPackBytes;
  const uint64_t valid = smaller(bytes - index * kPackBytes, kPackBytes);
  watch_read(from, valid);
  if (valid == kPackBytes && is_aligned(buffer)) return *reinterpret_cast<const Pack*>(from);
  unsigned char copy[kPackBytes] = {};
  for (uint64_t i = 0; i < valid; ++i) copy[i] = from[i];
  Pack pack;
  memcpy(&pack, copy, kPackBytes);
  return pack;
}

// Writes the index-th pack of a buffer of `bytes` bytes, up to its end.
JAX_RING_INLINE void store_pack(unsigned char* buffer, uint64_t bytes, uint64_t index, Pack pack) {
  unsigned char* to = buffer + index * kPackBytes;
  const uint64_t valid = smaller(bytes - index * kPackBytes, kPackBytes);
  watch_write(to, valid);
  if (valid == kPackBytes && is_aligned(buffer)) {
    *reinterpret_cast<Pack*>(to) = pack;
    return;
  }
  unsigned char copy[kPackBytes];
  memcpy(copy, &pack, kPackBytes);
  for (uint64_t i = 0; i < valid; ++i) to[i] = copy[i];
}

// Packs that a thread copies at a time: loads in flight hide the latency of GPU memory.
constexpr int kCopiesInFlight = 4;

// Visits every pack of `range` that lies in the message: store(operand, index, place, value) receives the result of
// load(operand, index, place), where `index` counts from the start of the operand and `place` from the start of the
// range. Each thread loads kInFlight packs before it stores them.
template <int kInFlight, class Team, class Load, class Store>
JAX_RING_TEAM void for_each_pack(const Message& message, PackRange range, Team team, Load load, Store store) {
  for (uint32_t i = 0; i < message.num_operands; ++i) {
    const Operand& operand = message.operands[i];
    const uint64_t end_of_operand = operand.first_pack + ceil_div(operand.bytes, kPackBytes);
    const uint64_t begin = range.begin > operand.first_pack ? range.begin : operand.first_pack;
    const uint64_t end = smaller(range.end, end_of_operand);
    uint64_t at = begin + team.thread();
    const uint64_t stride = team.size();
    for (; at + (kInFlight - 1) * stride < end; at += kInFlight * stride) {
      decltype(load(operand, uint64_t{}, uint64_t{})) values[kInFlight];
      JAX_RING_UNROLL
      for (int u = 0; u < kInFlight; ++u) {
        const uint64_t pack = at + u * stride;
        values[u] = load(operand, pack - operand.first_pack, pack - range.begin);
      }
      JAX_RING_UNROLL
      for (int u = 0; u < kInFlight; ++u) {
        const uint64_t pack = at + u * stride;
        store(operand, pack - operand.first_pack, pack - range.begin, values[u]);
      }
    }
    for (; at < end; at += stride) {
      const uint64_t index = at - operand.first_pack, place = at - range.begin;
      store(operand, index, place, load(operand, index, place));
    }
  }
}

// Load and store functions for operands.
JAX_RING_INLINE Pack input_pack(const Operand& operand, uint64_t index, int block = 0) {
  return load_pack(operand.input + block * operand.bytes, operand.bytes, index);
}
JAX_RING_INLINE void output_pack(const Operand& operand, uint64_t index, Pack pack, int block = 0) {
  store_pack(operand.output + block * operand.bytes, operand.bytes, index, pack);
}

// Fills a part of the outputs with copies of one pack.
template <class Team>
JAX_RING_TEAM void fill(const Message& message, PackRange range, int block, Team team, Pack value) {
  for_each_pack<1>(
      message, range, team, [&](const Operand&, uint64_t, uint64_t) { return value; },
      [&](const Operand& operand, uint64_t index, uint64_t, Pack pack) { output_pack(operand, index, pack, block); });
}

}  // namespace jax_ring
