// blocks.h: partitions an operand into the blocks of a ring, and a message into chunks, each folded by one worker.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "collective/options.h"

namespace jax_ring {

// Elements [begin, begin + count).
struct Range {
  size_t begin;
  size_t count;
};

// Block i of an operand, for 0 <= i < num_ranks: the result of rank i in a ring reduce-scatter. Packs are distributed
// evenly; if they do not divide evenly, the last blocks are shorter or empty.
JAX_RING_INLINE Range ring_block(size_t count, size_t element_bytes, int num_ranks, int i) {
  const size_t pack = kPackBytes / element_bytes;
  const size_t num_packs = (count + pack - 1) / pack;
  const size_t block = (num_packs + num_ranks - 1) / num_ranks * pack;
  const size_t begin = i * block < count ? i * block : count;
  return {begin, count - begin < block ? count - begin : block};
}

// The rank at which the fold of block i starts. It goes around the ring and ends with rank i, the owner.
JAX_RING_INLINE int ring_first_rank(int num_ranks, int i) { return i + 1 < num_ranks ? i + 1 : 0; }

// Elements [begin, begin + count) of one part of a message.
struct Chunk {
  size_t part;
  size_t begin;
  size_t count;
};

// The chunks of a message, in order. Every element of every part is in exactly one chunk. No chunk is empty or spans
// two parts. Chunks start at multiples of `chunk_elements` within their part.
class ChunkSchedule {
 public:
  // counts: elements of each part (zero is allowed). chunk_elements: the largest size of a chunk, at least 1.
  ChunkSchedule(std::vector<size_t> counts, size_t chunk_elements)
      : counts_(std::move(counts)), chunk_elements_(std::max<size_t>(chunk_elements, 1)) {
    ends_.reserve(counts_.size());
    size_t chunks = 0;
    for (size_t count : counts_) {
      chunks += (count + chunk_elements_ - 1) / chunk_elements_;
      ends_.push_back(chunks);
    }
  }

  size_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  Chunk operator[](size_t index) const {
    // The part of chunk `index`: the first one that ends after it. Empty parts have no chunks.
    const size_t part = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
    const size_t first = part == 0 ? 0 : ends_[part - 1];
    const size_t begin = (index - first) * chunk_elements_;
    return {part, begin, std::min(chunk_elements_, counts_[part] - begin)};
  }

 private:
  std::vector<size_t> counts_;
  size_t chunk_elements_;
  std::vector<size_t> ends_;  // ends_[i]: number of chunks in parts 0..i
};

}  // namespace jax_ring
