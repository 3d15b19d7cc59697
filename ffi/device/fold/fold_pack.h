// fold_pack.h: the fold over ranks, one pack at a time.
#pragma once

#include "collective/fold.h"
#include "device/memory/memory.h"
#include "device/memory/pack.h"

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

  // Packs of a partial fold sent to the next rank: an accumulator may be wider than its elements.
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

// i mod p for i < 2p, without a division.
JAX_RING_TEAM int modulo(int i, int p) { return i < p ? i : i - p; }

// Peers whose packs are loaded together, to pay the memory latency only once. Small types have wider accumulators,
// which leave registers for fewer.
template <class Element>
constexpr int kPeersInFlight = kPerPack<Element> <= 8 ? 7 : 4;

// The packs of some peers, in fold order.
template <int kCount>
struct PeerPacks {
  Pack pack[kCount];
};

// The fold position of this rank's i-th peer, if this rank has position `own`.
JAX_RING_TEAM int place_of_peer(int i, int own) { return i < own ? i : i + 1; }

// The fold over all ranks in order, with this rank at position `own`. `peers` holds the packs of the first peers, and
// load(first) returns those of the peers from `first` on.
template <class Element, class Op, class Load>
JAX_RING_TEAM Pack fold_packs(int num_ranks, int own, Pack mine, PeerPacks<kPeersInFlight<Element>> peers, Load load,
                              Op op) {
  constexpr int kInFlight = kPeersInFlight<Element>;
  PackFold<Element> fold{};
  JAX_RING_NO_UNROLL
  for (int first = 0; first < num_ranks - 1; first += kInFlight) {
    if (first > 0) peers = load(first);
    JAX_RING_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int peer = first + i;
      if (peer >= num_ranks - 1) continue;
      if (i == 0 && first == 0) {
        fold.start(own == 0 ? mine : peers.pack[0]);
        if (own == 0) fold.add(peers.pack[0], op);
        continue;
      }
      if (peer == own) fold.add(mine, op);
      fold.add(peers.pack[i], op);
    }
  }
  if (num_ranks == 1) fold.start(mine);
  if (num_ranks > 1 && own == num_ranks - 1) fold.add(mine, op);
  return fold.result();
}

}  // namespace jax_ring
