// fold_tree.h: the fold along a tree, one pack at a time.
#pragma once

#include <type_traits>

#include "device/fold/fold_pack.h"
#include "device/fold/tree_program.h"

namespace jax_ring {

// The sources of a fold's values. In rank order each rank sends one value to its peers and keeps its own.
struct RankTerms {
  static constexpr bool kIsTree = false;
  static constexpr int kFirstStep = 1;  // sends to the ranks this many places further on, and to later ones
  JAX_RING_TEAM int num_slots() const { return 1; }
};

// Along a tree a rank may have several values. It also sends its own through its own mailbox, so that all terms load
// alike.
struct TreeTerms {
  const TreeProgram& program;

  static constexpr bool kIsTree = true;
  static constexpr int kFirstStep = 0;
  JAX_RING_TEAM int num_slots() const { return program.num_slots; }
  JAX_RING_TEAM int num_results() const { return program.num_results; }
};

// A pack, or half of one if accumulators are much wider than elements, so that the sums on the stack fit into
// registers.
template <int kWords>
struct Piece {
  uint64_t word[kWords];
};

// A piece in a mailbox: part `part` of a pack.
template <int kWords>
JAX_RING_TEAM Piece<kWords> read_piece(const Pack* from, int part) {
  if constexpr (kWords == 1) {
    return {{read_word(from->word + part)}};
  } else {
    return bit_cast<Piece<kWords>>(read_pack(from));
  }
}

template <class Element>
constexpr bool kIsExact = std::is_integral_v<typename Element::Accumulator>;
template <class Element>
constexpr int kPieceWords = kPerPack<Element> <= 8 || kIsExact<Element> ? 2 : 1;

// Terms loaded together, to pay the memory latency only once: a block, or half of one if elements and accumulators
// leave too few registers.
template <class Element>
constexpr int kTermsInFlight = kPieceWords<Element> == 2 && kPerPack<Element> >= 8 ? kBlockTerms / 2 : kBlockTerms;

template <class Element>
struct Pieces {
  Piece<kPieceWords<Element>> piece[kTermsInFlight<Element>];
};

// A partial sum at the places of one piece.
template <class Element>
struct PieceSum {
  static constexpr int kValues = kPerPack<Element> * kPieceWords<Element> / 2;
  struct Values {
    typename Element::Storage value[kValues];
    JAX_RING_INLINE typename Element::Storage operator()(int v) const { return value[v]; }
  };
  Partial<Element, Scalar, kValues> partial;

  static JAX_RING_TEAM PieceSum of(const Piece<kPieceWords<Element>>& piece) {
    PieceSum sum;
    sum.partial.start(bit_cast<Values>(piece));
    return sum;
  }
  // The later one in shard order is on the right.
  template <class Op>
  JAX_RING_TEAM void add(const PieceSum& right, Op op) {
    partial.merge(right.partial, op);
  }
  JAX_RING_TEAM Piece<kPieceWords<Element>> result() const {
    Values rounded;
    partial.finish([&](int v, typename Element::Storage value) JAX_RING_LAMBDA { rounded.value[v] = value; });
    return bit_cast<Piece<kPieceWords<Element>>>(rounded);
  }
};

// The sum of kCount places of a block. The first of them has a term.
template <int kCount, int kFrom, class Element, class Op>
JAX_RING_TEAM PieceSum<Element> sum_of_places(const TreeProgram& program, int first, const Pieces<Element>& terms,
                                              Op op) {
  if constexpr (kCount == 1) {
    return PieceSum<Element>::of(terms.piece[kFrom]);
  } else {
    constexpr int kHalf = kCount / 2;
    PieceSum<Element> sum = sum_of_places<kHalf, kFrom, Element>(program, first, terms, op);
    if (program.exists(first + kFrom + kHalf)) {
      sum.add(sum_of_places<kHalf, kFrom + kHalf, Element>(program, first, terms, op), op);
    }
    return sum;
  }
}

// The sum of one block. load(first) returns the terms of some places, starting at `first`.
template <class Element, class Op, class Load>
JAX_RING_TEAM PieceSum<Element> sum_of_block(const TreeProgram& program, int first, Load load, Op op) {
  constexpr int kCount = kTermsInFlight<Element>;
  PieceSum<Element> sum = sum_of_places<kCount, 0, Element>(program, first, load(first), op);
  if constexpr (kCount < kBlockTerms) {
    static_assert(2 * kCount == kBlockTerms);
    if (program.exists(first + kCount)) {
      sum.add(sum_of_places<kCount, 0, Element>(program, first + kCount, load(first + kCount), op), op);
    }
  }
  return sum;
}

// The fold for one result.
template <class Element, class Op, class Load>
JAX_RING_TEAM Piece<kPieceWords<Element>> fold_terms(const TreeProgram& program, int result, Load load, Op op) {
  const int root = program.root_of(result), end = program.end_block(root);
  if constexpr (kIsExact<Element>) {
    // Sums of integers are the same in every order, so they need no stack.
    constexpr int kCount = kTermsInFlight<Element>;
    PieceSum<Element> sum{};
    JAX_RING_NO_UNROLL
    for (int first = program.first_block(root) * kBlockTerms; first < end * kBlockTerms; first += kCount) {
      const Pieces<Element> terms = load(first);
      JAX_RING_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (program.exists(first + i)) sum.add(PieceSum<Element>::of(terms.piece[i]), op);
      }
    }
    return sum.result();
  } else {
    PieceSum<Element> stack[kMaxStacked]{};
    JAX_RING_NO_UNROLL
    for (int block = program.first_block(root); block < end; ++block) {
      PieceSum<Element> sum = sum_of_block<Element>(program, block * kBlockTerms, load, op);
      const int below = program.below[block], top = below + program.merges[block];
      // Constant indices keep the stack in registers.
      JAX_RING_UNROLL
      for (int i = kMaxStacked - 1; i >= 0; --i) {
        if (i >= below && i < top) {
          PieceSum<Element> left = stack[i];
          left.add(sum, op);
          sum = left;
        }
        if (i == below) stack[i] = sum;
      }
    }
    return stack[0].result();
  }
}

// The fold of whole packs. load(first, part) returns part `part` of the packs.
template <class Element, class Op, class Load>
JAX_RING_TEAM Pack fold_tree(const TreeProgram& program, int result, Load load, Op op) {
  constexpr int kWords = kPieceWords<Element>, kParts = 2 / kWords;
  Pack pack{};
  JAX_RING_NO_UNROLL
  for (int part = 0; part < kParts; ++part) {
    const auto piece = fold_terms<Element>(program, result, [&](int first) { return load(first, part); }, op);
    if constexpr (kWords == 2) {
      pack = {{piece.word[0], piece.word[1]}};
    } else {
      pack.word[0] = part == 0 ? piece.word[0] : pack.word[0];
      pack.word[1] = piece.word[0];
    }
  }
  return pack;
}

}  // namespace jax_ring
