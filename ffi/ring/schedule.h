// schedule.h: how a message of many operands is cut into chunks, each folded by one worker.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace jax_ring {

// Elements [begin, begin + count) of one operand.
struct Chunk {
  size_t operand;
  size_t begin;
  size_t count;
};

// The chunks of a message, in order: every element of every operand lies in exactly one chunk, no chunk is
// empty or spans two operands, and chunks begin at multiples of `chunk_elements` within their operand.
class ChunkSchedule {
 public:
  // counts: elements of each operand (zero is allowed). chunk_elements: the largest size of a chunk, at least 1.
  ChunkSchedule(std::vector<size_t> counts, size_t chunk_elements)
      : counts_(std::move(counts)), chunk_elements_(std::max<size_t>(chunk_elements, 1)) {
    ends_.reserve(counts_.size());
    size_t chunks = 0;
    for (size_t count : counts_) {
      chunks += (count + chunk_elements_ - 1) / chunk_elements_;
      ends_.push_back(chunks);
    }
  }

  // Chunks of the whole message.
  size_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  Chunk operator[](size_t index) const {
    // The first operand whose chunks end after `index`; operands without elements have none.
    const size_t operand = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
    const size_t first = operand == 0 ? 0 : ends_[operand - 1];
    const size_t begin = (index - first) * chunk_elements_;
    return {operand, begin, std::min(chunk_elements_, counts_[operand] - begin)};
  }

 private:
  std::vector<size_t> counts_;
  size_t chunk_elements_;
  std::vector<size_t> ends_;  // ends_[i]: chunks of operands 0..i together
};

}  // namespace jax_ring
