// processes_tree_test.cc: sums along the tree between processes, against the definition of the tree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/tree.h"
#include "tests/support/processes.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::shm {
namespace {

// A tree's shards, and a group's ranks among those that hold them.
struct Shards {
  int count;
  int num_ranks;
  std::vector<int> members;  // in ascending order
};

Shards all_of(int count, int num_ranks) {
  std::vector<int> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back(rank);
  return {count, num_ranks, members};
}

struct Trees {
  explicit Trees(const Shards& shards)
      : tree(shards.count, shards.num_ranks, shards.members),
        reference(shards.count, shards.num_ranks, shards.members) {}
  Tree tree;
  ReferenceTree reference;
};

// A call of a group along a tree, with random operands. num_results: of a reduce-scatter.
class TreeCall : public GroupCall {
 public:
  TreeCall(const Shards& shards, Collective collective, Op op, DType dtype, std::vector<size_t> counts, bool in_place,
           bool one_shot, int num_results, uint64_t id)
      : TreeCall(std::make_shared<const Trees>(shards),
                 Plan{collective, Order::tree,
                      collective == Collective::reduce ? static_cast<int>(id % shards.members.size()) : 0},
                 op, dtype, std::move(counts), static_cast<int>(shards.members.size()), in_place, one_shot, num_results,
                 id) {}

 private:
  TreeCall(const std::shared_ptr<const Trees>& trees, const Plan& plan, Op op, DType dtype, std::vector<size_t> counts,
           int num_ranks, bool in_place, bool one_shot, int num_results, uint64_t id)
      : GroupCall({dtype, std::move(counts), plan, op, &trees->tree, num_results}, num_ranks, in_place, one_shot, id,
                  [=](const std::vector<Bytes>& operands, size_t count, int rank) {
                    return expected_tree_result(plan, op, dtype, trees->reference, operands, count, num_results, rank);
                  }) {}
};

void run(Processes& processes, GroupCall& call) {
  on_all(processes.count(), [&](int process) { call.submit(processes[process]); });
  call.expect_results();
}

struct Layout {
  std::vector<int64_t> process_of_rank;
  std::vector<int> shards;  // numbers of shards to test
};

const std::vector<Layout> kLayouts = {
    {{0, 1}, {2, 6}},
    {{0, 0, 1}, {3, 24}},
    {{0, 1, 0, 1}, {4, 12}},
    {{0, 0, 0, 1, 2, 2}, {6, 24}},
    {{0, 0, 0, 0, 1, 1, 1, 1}, {8, 24}},
    {{0, 0, 1, 1, 2, 2, 3, 3}, {8, 24}},
    {{0, 1, 0, 1, 0, 1, 0, 1}, {8, 24}},
};

class ProcessesTreeTest : public ::testing::TestWithParam<DType> {};

TEST_P(ProcessesTreeTest, MatchesTheDefinition) {
  uint64_t id = 0;
  for (const Layout& layout : kLayouts) {
    Processes processes(layout.process_of_rank);
    const int p = processes.num_ranks();
    for (int num_shards : layout.shards) {
      for (Collective collective : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce}) {
        const bool scatters = collective == Collective::reduce_scatter;
        const size_t each = scatters ? p : 1, most = scatters ? 211 * p : 1601;
        for (bool one_shot : {false, true}) {
          SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(num_shards) + " shards, collective " +
                       std::to_string(static_cast<int>(collective)) + (one_shot ? ", one-shot" : ""));
          const Op op = ++id % 4 == 0 ? Op::max : Op::sum;
          const bool in_place = !scatters && num_shards == p && one_shot;
          TreeCall call(all_of(num_shards, p), collective, op, GetParam(), {0, each, 17 * each, most}, in_place,
                        one_shot, 1, id);
          ASSERT_NO_FATAL_FAILURE(run(processes, call));
        }
      }
    }
  }
}

// A group's members are a tree's ranks on one host, and each gets its block of several sums.
TEST_P(ProcessesTreeTest, PartsOfATree) {
  const std::vector<std::pair<Shards, std::vector<int64_t>>> groups = {
      {{8, 8, {0, 1, 2, 3}}, {0, 0, 1, 1}},         // one sum
      {{8, 8, {0, 2, 4, 6}}, {0, 0, 1, 1}},         // one per rank
      {{24, 8, {1, 3, 4, 5, 6}}, {0, 1, 1, 0, 1}},  // some span several ranks, and some one process
      {{24, 6, {2, 3, 4}}, {0, 1, 2}},              //
      {{48, 12, {0, 1, 2, 3, 4, 7, 8, 9, 11}}, {0, 0, 0, 0, 1, 1, 1, 1, 1}},
  };
  uint64_t id = 0;
  for (const auto& [shards, process_of_rank] : groups) {
    Processes processes(process_of_rank);
    const int p = processes.num_ranks();
    const int num_roots = static_cast<int>(Tree(shards.count, shards.num_ranks, shards.members).roots().size());
    for (int num_results : {num_roots, num_roots + 2}) {
      SCOPED_TRACE(std::to_string(shards.count) + " shards, " + std::to_string(p) + " ranks, " +
                   std::to_string(num_results) + " results");
      TreeCall call(shards, Collective::reduce_scatter, Op::sum, GetParam(), {size_t(p) * 130, 0, size_t(p)}, false,
                    id % 2 == 0, num_results, id);
      ++id;
      ASSERT_NO_FATAL_FAILURE(run(processes, call));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ProcessesTreeTest,
                         ::testing::Values(DType::u8, DType::s32, DType::f32, DType::bf16, DType::f64),
                         [](const auto& info) { return name_of(info.param); });

// So little memory that a round has room for only some of the parts.
TEST(ProcessesTree, LittleMemory) {
  uint64_t id = 0;
  for (DType dtype : {DType::bf16, DType::f32}) {
    for (const auto& [process_of_rank, num_shards] :
         std::vector<std::pair<std::vector<int64_t>, int>>{{{0, 1, 0, 1, 0, 1, 0, 1}, 24}, {{0, 0, 0, 1}, 92}}) {
      Processes processes(process_of_rank, {{1024, 128}});
      const int p = processes.num_ranks();
      for (Collective collective : {Collective::all_reduce, Collective::reduce_scatter}) {
        for (bool one_shot : {false, true}) {
          TreeCall call(all_of(num_shards, p), collective, Op::sum, dtype, {size_t(p) * 200, size_t(p)}, false,
                        one_shot, 1, ++id);
          ASSERT_NO_FATAL_FAILURE(run(processes, call));
        }
      }
    }
  }
}

// Large enough for streaming stores, and with the real size of the shared memory.
TEST(ProcessesTree, LargeMessages) {
  for (int num_shards : {3, 9}) {
    Processes processes({0, 0, 1}, {{256 << 10, 128 << 10}});
    TreeCall call(all_of(num_shards, 3), Collective::all_reduce, Op::sum, DType::f32, {400'001, 5}, false, false, 1,
                  num_shards);
    ASSERT_NO_FATAL_FAILURE(run(processes, call));
  }
}

// One group's memory serves calls with and without a tree, and with different trees, one after the other.
TEST(ProcessesTree, LoopsOfCalls) {
  Processes processes({0, 0, 1, 1});
  std::vector<std::unique_ptr<GroupCall>> calls;
  for (int i = 0; i < 300 / kSlowdown; ++i) {
    const std::vector<size_t> counts{4 * (i % 9u)};
    const bool one_shot = i % 5 == 0;
    if (i % 2 == 0) {
      const Plan plan{i % 3 == 0 ? Collective::reduce_scatter : Collective::all_gather};
      cpu::Message message{DType::f32, counts, plan};
      calls.push_back(std::make_unique<GroupCall>(
          std::move(message), 4, false, one_shot, i, [=](const std::vector<Bytes>& operands, size_t count, int rank) {
            return expected_result(plan, Op::sum, DType::f32, operands, count, rank);
          }));
    } else {
      calls.push_back(std::make_unique<TreeCall>(all_of(4 * (i % 7 + 1), 4),
                                                 i % 3 == 0 ? Collective::reduce_scatter : Collective::all_reduce,
                                                 Op::sum, DType::f32, counts, false, one_shot, 1, i));
    }
  }
  on_all(processes.count(), [&](int process) {
    for (auto& call : calls) call->submit(processes[process]);
  });
  for (auto& call : calls) ASSERT_NO_FATAL_FAILURE(call->expect_results());
}

}  // namespace
}  // namespace jax_ring::shm
