// blocks_test.cc: the blocks of a ring and the chunks of a message cover every element exactly once.
#include "collective/blocks.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace jax_ring {
namespace {

// Visits the chunks in order and checks every promise of the header.
void expect_exact_cover(const std::vector<size_t>& counts, size_t chunk_elements) {
  SCOPED_TRACE(::testing::Message() << "counts " << ::testing::PrintToString(counts) << ", chunks of "
                                    << chunk_elements);
  const ChunkSchedule schedule(counts, chunk_elements);
  const size_t longest = std::max<size_t>(chunk_elements, 1);
  std::vector<size_t> covered(counts.size(), 0);
  size_t last_part = 0;
  for (size_t index = 0; index < schedule.size(); ++index) {
    const Chunk chunk = schedule[index];
    ASSERT_LT(chunk.part, counts.size());
    ASSERT_GE(chunk.part, last_part) << "chunk " << index;
    last_part = chunk.part;
    // In order, without gaps or overlaps: each chunk starts where the last one of its part ended.
    ASSERT_EQ(chunk.begin, covered[chunk.part]) << "chunk " << index;
    ASSERT_EQ(chunk.begin % longest, 0u) << "chunk " << index;
    ASSERT_GE(chunk.count, 1u) << "chunk " << index;
    ASSERT_LE(chunk.count, longest) << "chunk " << index;
    covered[chunk.part] += chunk.count;
  }
  EXPECT_EQ(covered, counts);
}

TEST(RingBlock, BlocksCoverTheOperandInOrder) {
  for (size_t element_bytes : {1, 2, 4, 8}) {
    const size_t pack = 16 / element_bytes;
    for (int num_ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
      for (size_t count = 0; count <= 9 * 16 * pack + 1; count += count < 40 ? 1 : 7) {
        SCOPED_TRACE(::testing::Message() << element_bytes << " bytes, " << num_ranks << " ranks, count " << count);
        const size_t packs = (count + pack - 1) / pack;
        const size_t longest = (packs + num_ranks - 1) / num_ranks * pack;
        size_t covered = 0;
        for (int i = 0; i < num_ranks; ++i) {
          const Range block = ring_block(count, element_bytes, num_ranks, i);
          ASSERT_EQ(block.begin, covered) << "block " << i;
          ASSERT_EQ(block.count, std::min(longest, count - covered)) << "block " << i;
          covered += block.count;
        }
        ASSERT_EQ(covered, count);
      }
    }
  }
}

TEST(RingBlock, KnownBlocks) {
  // 10 floats are 3 packs: one for each of the first three of four ranks, and the third pack is half full.
  EXPECT_EQ(ring_block(10, 4, 4, 0).begin, 0u);
  EXPECT_EQ(ring_block(10, 4, 4, 1).begin, 4u);
  EXPECT_EQ(ring_block(10, 4, 4, 2).begin, 8u);
  EXPECT_EQ(ring_block(10, 4, 4, 2).count, 2u);
  EXPECT_EQ(ring_block(10, 4, 4, 3).begin, 10u);
  EXPECT_EQ(ring_block(10, 4, 4, 3).count, 0u);
}

TEST(RingBlock, FoldBeginsAfterItsOwner) {
  EXPECT_EQ(ring_first_rank(4, 0), 1);
  EXPECT_EQ(ring_first_rank(4, 2), 3);
  EXPECT_EQ(ring_first_rank(4, 3), 0);
  EXPECT_EQ(ring_first_rank(1, 0), 0);
}

TEST(RingBlock, LargeOperandsDoNotOverflow) {
  const size_t huge = (size_t{1} << 42) + 3;
  const Range last = ring_block(huge, 1, 16, 15);
  EXPECT_EQ(last.begin + last.count, huge);
}

TEST(ChunkSchedule, CoversOneOperand) {
  for (size_t chunk_elements : {1, 2, 3, 7, 8, 64}) {
    for (size_t count = 0; count <= 130; ++count) expect_exact_cover({count}, chunk_elements);
  }
}

TEST(ChunkSchedule, CoversManyOperands) {
  for (size_t chunk_elements : {1, 4, 5, 100}) {
    expect_exact_cover({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, chunk_elements);
    expect_exact_cover({8, 8, 8}, chunk_elements);
    expect_exact_cover({100, 1, 100, 1}, chunk_elements);
  }
}

TEST(ChunkSchedule, OperandsWithoutElementsHaveNoChunks) {
  for (size_t chunk_elements : {1, 4, 5}) {
    expect_exact_cover({0, 8, 0, 0, 3, 0}, chunk_elements);
    expect_exact_cover({0, 0, 1}, chunk_elements);
    expect_exact_cover({5, 0, 0}, chunk_elements);
  }
  EXPECT_EQ(ChunkSchedule({0, 8, 0, 3}, 4).size(), 3u);
}

TEST(ChunkSchedule, NothingToDo) {
  EXPECT_EQ(ChunkSchedule({}, 16).size(), 0u);
  EXPECT_EQ(ChunkSchedule({0}, 16).size(), 0u);
  EXPECT_EQ(ChunkSchedule({0, 0, 0}, 16).size(), 0u);
}

TEST(ChunkSchedule, NumberOfChunksIsTheSmallestPossible) {
  EXPECT_EQ(ChunkSchedule({1}, 16).size(), 1u);
  EXPECT_EQ(ChunkSchedule({16}, 16).size(), 1u);
  EXPECT_EQ(ChunkSchedule({17}, 16).size(), 2u);
  EXPECT_EQ(ChunkSchedule({16, 17, 32, 33}, 16).size(), 1u + 2u + 2u + 3u);
}

TEST(ChunkSchedule, ChunksOfNoElementsBecomeChunksOfOne) {
  expect_exact_cover({3, 0, 2}, 0);
  EXPECT_EQ(ChunkSchedule({3, 0, 2}, 0).size(), 5u);
}

TEST(ChunkSchedule, LargeOperandsDoNotOverflow) {
  const size_t huge = (size_t{1} << 40) + 3;
  const ChunkSchedule schedule({huge, 1, huge}, 8192);
  const size_t chunks = (huge + 8191) / 8192;
  ASSERT_EQ(schedule.size(), 2 * chunks + 1);
  EXPECT_EQ(schedule[chunks - 1].begin, (chunks - 1) * 8192);
  EXPECT_EQ(schedule[chunks - 1].count, 3u);
  EXPECT_EQ(schedule[chunks].part, 1u);
  const Chunk last = schedule[schedule.size() - 1];
  EXPECT_EQ(last.part, 2u);
  EXPECT_EQ(last.begin + last.count, huge);
}

TEST(ChunkSchedule, RandomMessages) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<size_t> counts(random() % 20);
    for (size_t& count : counts) count = random() % 4 == 0 ? 0 : random() % 200;
    expect_exact_cover(counts, 1 + random() % 50);
  }
}

}  // namespace
}  // namespace jax_ring
