// fold_pack.h: the fold over ranks, one pack at a time.
#pragma once

#include "ring/fold.h"
#include "ring/memory.h"
#include "ring/pack.h"

namespace jax_ring {

// The elements of a pack.
template <class Element>
struct Elements {
  typename Element::Storage value[kPerPack<Element>];

  static JAX_RING_INLINE Elements of(const Pack& pack) { return bit_cast<Elements>(pack); }
  JAX_RING_INLINE Pack pack() const { return bit_cast<Pack>(*this); }
  JAX_RING_INLINE typename Element::Storage operator()(int v) const { return value[v]; }
};

// A partial fold at the places of one pack.
template <class Element>
struct PackFold {
  Partial<Element, Scalar, kPerPack<Element>> partial;

  // Packs that a partial fold takes when sent to the next rank: an accumulator may be wider than its elements.
  static constexpr int kPacks = static_cast<int>(sizeof(partial) / kPackBytes);

  JAX_RING_INLINE void start(const Pack& pack) { partial.start(Elements<Element>::of(pack)); }
  template <class Op>
  JAX_RING_INLINE void add(const Pack& pack, Op op) {
    partial.add(Elements<Element>::of(pack), op);
  }
  JAX_RING_INLINE Pack result() const {
    Elements<Element> rounded;
    partial.finish([&](int v, typename Element::Storage value) JAX_RING_LAMBDA { rounded.value[v] = value; });
    return rounded.pack();
  }

  // As packs in a mailbox.
  JAX_RING_TEAM void save(Pack* to) const {
    Pack packs[kPacks];
    memcpy(packs, &partial, sizeof(partial));
    JAX_RING_UNROLL
    for (int i = 0; i < kPacks; ++i) write_pack(to + i, packs[i]);
  }
  JAX_RING_TEAM void restore(const Pack* from) {
    Pack packs[kPacks];
    JAX_RING_UNROLL
    for (int i = 0; i < kPacks; ++i) packs[i] = read_pack(from + i);
    memcpy(&partial, packs, sizeof(partial));
  }
};

// Ranks, besides the first, whose packs are loaded together, so that the memory latency is paid once for all of them.
constexpr int kRanksInFlight = 7;

// The fold over ranks 0, 1, ..., p-1. load(rank) returns the rank's pack.
template <class Element, class Op, class Load>
JAX_RING_INLINE Pack fold_packs(int num_ranks, Load load, Op op) {
  PackFold<Element> fold;
  fold.start(load(0));
  for (int first = 1; first < num_ranks; first += kRanksInFlight) {
    Pack packs[kRanksInFlight] = {};
    JAX_RING_UNROLL
    for (int i = 0; i < kRanksInFlight; ++i) {
      if (first + i < num_ranks) packs[i] = load(first + i);
    }
    JAX_RING_UNROLL
    for (int i = 0; i < kRanksInFlight; ++i) {
      if (first + i < num_ranks) fold.add(packs[i], op);
    }
  }
  return fold.result();
}

}  // namespace jax_ring
