// rounds_test.cc: rounds are tiny if a process's staged data fits beside its signals.
#include "shm/exchange/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cpu/engine.h"
#include "shm/exchange/sources.h"

namespace jax_ring::shm {
namespace {

constexpr size_t kLine = 64;

std::vector<Round> rounds_of(const Group& group, const cpu::Message& message, bool one_shot, Capacity capacity) {
  Rounds rounds(group);
  rounds.begin(message, one_shot, capacity);
  std::vector<Round> all;
  for (Round round; rounds.next(round);) all.push_back(round);
  return all;
}

cpu::Message message_of(Collective collective, DType dtype, std::vector<size_t> counts) {
  return {dtype, std::move(counts), Plan{collective}};
}

TEST(Rounds, OneValueOfUpTo8BytesIsTiny) {
  const Group group({0, 1}, 0);
  const Capacity capacity{4096, 4096};
  const auto is_tiny = [&](const cpu::Message& message) {
    const std::vector<Round> rounds = rounds_of(group, message, true, capacity);
    return rounds.size() == 1 && rounds[0].is_tiny;
  };
  EXPECT_TRUE(is_tiny(message_of(Collective::all_reduce, DType::f32, {1})));
  EXPECT_TRUE(is_tiny(message_of(Collective::all_reduce, DType::f64, {1})));
  EXPECT_TRUE(is_tiny(message_of(Collective::all_reduce, DType::u8, {8})));
  EXPECT_FALSE(is_tiny(message_of(Collective::all_reduce, DType::u8, {9})));
  EXPECT_FALSE(is_tiny(message_of(Collective::all_reduce, DType::f32, {1, 1})));
}

// Of some blocks and terms only a part fits a round, and that part may be more than one value.
TEST(Rounds, TinyOnesStageNothingBehindTheFirstLine) {
  for (const std::vector<int64_t>& process_of_rank : {std::vector<int64_t>{0, 1}, {0, 0, 1}, {0, 0, 0, 1, 1, 1}}) {
    const Group group(process_of_rank, 0);
    const size_t num_ranks = process_of_rank.size();
    for (Collective collective :
         {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::all_to_all}) {
      for (size_t lines : {1, 2, 3, 4, 64}) {
        const cpu::Message message = message_of(collective, DType::u8, {num_ranks, num_ranks});
        // Room for one part for all ranks of a process at least.
        const Capacity capacity{(lines + 2) * kLine, (lines + 2) * kLine};
        for (bool one_shot : {false, true}) {
          for (const Round& round : rounds_of(group, message, one_shot, capacity)) {
            // A piece without staged data of a process may stand at the end of the first line.
            const bool is_behind =
                std::any_of(round.staged_at.begin(), round.staged_at.end(), [](size_t at) { return at > kLine; });
            EXPECT_FALSE(round.is_tiny && is_behind) << num_ranks << " ranks, " << lines << " lines";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ring::shm
