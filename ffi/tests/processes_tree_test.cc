// processes_tree_test.cc: sums along the tree between processes, against the definition of the tree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/completion_threads.h"
#include "processes.h"
#include "ring/tree.h"
#include "support.h"

namespace jax_ring::shm {
namespace {

using namespace cpu::testing;
using cpu::element_size;
using cpu::Rendezvous;
using cpu::RendezvousPtr;

// A group whose members hold some of the shards of a tree.
struct Shards {
  int count;
  int num_ranks;             // that hold them
  std::vector<int> members;  // the ranks in the group, in ascending order

  int rank_of(int shard) const { return shard / (count / num_ranks); }
  bool is_member(int rank) const { return std::find(members.begin(), members.end(), rank) != members.end(); }
};

Shards all_of(int count, int num_ranks) {
  std::vector<int> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back(rank);
  return {count, num_ranks, members};
}

// The tree from its definition, by recursion over its nodes: shards [begin, end).
class Definition {
 public:
  explicit Definition(const Shards& shards) : shards_(shards), num_terms_(shards.num_ranks) { find(0, shards.count); }

  int num_slots() const { return *std::max_element(num_terms_.begin(), num_terms_.end()); }

  // The sums of the largest nodes whose shards the group holds. value_of(member, slot) is a term.
  template <class Value>
  std::vector<uint64_t> sums(DType dtype, Op op, const Value& value_of) const {
    std::vector<uint64_t> found;
    find_sums(0, shards_.count, [&](int begin, int end) {
      const uint64_t sum = fold(begin, end, dtype, op, value_of);
      found.push_back(!is_small(dtype) ? sum : SmallFloatReference::of(dtype).encode(bit_cast<float>(uint32_t(sum))));
    });
    return found;
  }

 private:
  struct Term {
    int begin, end, slot;
  };

  static int middle(int begin, int end) {
    int left = 1;
    while (2 * left < end - begin) left *= 2;
    return begin + left;
  }
  bool is_one_rank(int begin, int end) const { return shards_.rank_of(begin) == shards_.rank_of(end - 1); }

  void find(int begin, int end) {
    if (is_one_rank(begin, end)) return terms_.push_back({begin, end, num_terms_[shards_.rank_of(begin)]++});
    find(begin, middle(begin, end));
    find(middle(begin, end), end);
  }

  template <class Visit>
  void find_sums(int begin, int end, const Visit& visit) const {
    bool all = true;
    for (int shard = begin; shard < end; ++shard) all = all && shards_.is_member(shards_.rank_of(shard));
    if (all) return visit(begin, end);
    if (end - begin == 1) return;
    find_sums(begin, middle(begin, end), visit);
    find_sums(middle(begin, end), end, visit);
  }

  // As the bits of the accumulator.
  template <class Value>
  uint64_t fold(int begin, int end, DType dtype, Op op, const Value& value_of) const {
    for (const Term& term : terms_) {
      if (term.begin != begin || term.end != end) continue;
      const auto member = std::find(shards_.members.begin(), shards_.members.end(), shards_.rank_of(begin));
      const uint64_t bits = value_of(static_cast<int>(member - shards_.members.begin()), term.slot);
      return is_small(dtype) ? bit_cast<uint32_t>(SmallFloatReference::of(dtype).decoded(static_cast<uint32_t>(bits)))
                             : bits;
    }
    const uint64_t left = fold(begin, middle(begin, end), dtype, op, value_of);
    const uint64_t right = fold(middle(begin, end), end, dtype, op, value_of);
    return scalar_fold(is_small(dtype) ? DType::f32 : dtype, {left, right}, op);
  }

  const Shards shards_;
  std::vector<Term> terms_;
  std::vector<int> num_terms_;  // by rank
};

// One call, with the operands and results of all members of a group.
class TreeCall {
 public:
  TreeCall(const Shards& shards, const Plan& plan, Op op, DType dtype, std::vector<size_t> counts, bool one_shot,
           bool in_place, int num_results, uint64_t id)
      : definition_(shards),
        tree_(shards.count, shards.num_ranks, shards.members),
        message_{dtype, std::move(counts), plan, op, &tree_, num_results},
        num_members_(static_cast<int>(shards.members.size())),
        one_shot_(one_shot),
        in_place_(in_place),
        id_(id),
        outcomes_(num_members_) {
    EXPECT_EQ(tree_.num_slots(), definition_.num_slots());
    for (size_t count : message_.counts) {
      operands_.push_back(random_elements(dtype, num_members_, definition_.num_slots() * count, count + id));
      inputs_.emplace_back();
      outputs_.emplace_back();
      for (const Bytes& of_rank : operands_.back()) {
        inputs_.back().emplace_back(of_rank, 0);
        const size_t results = num_results * result_count(plan, num_members_, count);
        outputs_.back().emplace_back(Bytes(results * element_size(dtype), 0xa5), 0);
      }
    }
  }

  void submit(Communicator& communicator) {
    RendezvousPtr rendezvous(new Rendezvous);
    rendezvous->run_id = run_id_;
    rendezvous->done.resize(num_members_);
    const Group& group = communicator.group();
    for (int rank : group.ranks_of(group.self())) rendezvous->done[rank] = outcomes_[rank].completion();
    for (size_t operand = 0; operand < message_.counts.size(); ++operand) {
      auto& outputs = (in_place_ ? inputs_ : outputs_)[operand];
      for (int i = 0; i < 2 * num_members_; ++i) {
        const int rank = i % num_members_;
        rendezvous->inputs.push_back(group.is_local(rank) ? inputs_[operand][rank].data() : nullptr);
      }
      for (int rank = 0; rank < num_members_; ++rank) {
        rendezvous->outputs.push_back(group.is_local(rank) ? outputs[rank].data() : nullptr);
      }
    }
    const auto text = std::make_shared<std::string>("call " + std::to_string(id_));
    rendezvous = communicator.submit({std::move(rendezvous), message_, id_, one_shot_, text});
    if (rendezvous != nullptr) cpu::CompletionThreads::instance().complete(std::move(rendezvous));
  }

  void expect_results() {
    for (const Outcome& of_rank : outcomes_) {
      ASSERT_TRUE(of_rank.wait());
      ASSERT_EQ(of_rank.error(), "");
    }
    for (size_t operand = 0; operand < message_.counts.size(); ++operand) ASSERT_NO_FATAL_FAILURE(expect(operand));
  }

 private:
  void expect(size_t operand) {
    const DType dtype = message_.dtype;
    const bool scatters = message_.plan.collective == Collective::reduce_scatter;
    const size_t count = message_.counts[operand], block = result_count(message_.plan, num_members_, count);
    for (size_t i = 0; i < count; ++i) {
      const std::vector<uint64_t> sums = definition_.sums(dtype, message_.op, [&](int member, int slot) {
        return element_bits(dtype, operands_[operand][member].data(), slot * count + i);
      });
      for (int rank = 0; rank < num_members_; ++rank) {
        if (scatters && rank != static_cast<int>(i / block)) continue;
        const bool is_zero = message_.plan.collective == Collective::reduce && rank != message_.plan.root;
        for (int result = 0; result < message_.num_results; ++result) {
          const uint64_t want = is_zero ? 0 : sums[std::min<size_t>(result, sums.size() - 1)];
          const auto& outputs = (in_place_ ? inputs_ : outputs_)[operand];
          const size_t at = scatters ? result * block + i % block : i;
          const uint64_t got = element_bits(dtype, const_cast<OffsetBuffer&>(outputs[rank]).data(), at);
          ASSERT_TRUE(got == want || (is_nan_element(dtype, got) && is_nan_element(dtype, want)))
              << "rank " << rank << ", operand " << operand << ", element " << at << ": " << got << ", not " << want;
        }
      }
    }
  }

  const Definition definition_;
  const Tree tree_;
  const cpu::Message message_;
  const int num_members_;
  const bool one_shot_, in_place_;
  const uint64_t id_;
  const int64_t run_id_ = next_run_id();
  std::vector<std::vector<Bytes>> operands_;                 // by operand, then member
  std::vector<std::vector<OffsetBuffer>> inputs_, outputs_;  // likewise
  std::vector<Outcome> outcomes_;
};

void run(Processes& processes, TreeCall& call) {
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
      for (const Plan& plan : {Plan{Collective::all_reduce, Order::tree}, Plan{Collective::reduce_scatter, Order::tree},
                               Plan{Collective::reduce, Order::tree, p - 1}}) {
        const bool scatters = plan.collective == Collective::reduce_scatter;
        const size_t each = scatters ? p : 1, most = scatters ? 211 * p : 1601;
        for (bool one_shot : {false, true}) {
          SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(num_shards) + " shards, collective " +
                       std::to_string(static_cast<int>(plan.collective)) + (one_shot ? ", one-shot" : ""));
          const Op op = ++id % 4 == 0 ? Op::max : Op::sum;
          const bool in_place = !scatters && num_shards == p && one_shot;
          TreeCall call(all_of(num_shards, p), plan, op, GetParam(), {0, each, 17 * each, most}, one_shot, in_place, 1,
                        id);
          ASSERT_NO_FATAL_FAILURE(run(processes, call));
        }
      }
    }
  }
}

// The members of a group are those ranks of a tree that are on one host, and each gets its block of several sums.
TEST_P(ProcessesTreeTest, PartsOfATree) {
  const std::vector<std::pair<Shards, std::vector<int64_t>>> groups = {
      {{8, 8, {0, 1, 2, 3}}, {0, 0, 1, 1}},         // one sum
      {{8, 8, {0, 2, 4, 6}}, {0, 0, 1, 1}},         // one of each rank
      {{24, 8, {1, 3, 4, 5, 6}}, {0, 1, 1, 0, 1}},  // some of which are of several ranks, and some of one process
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
      TreeCall call(shards, {Collective::reduce_scatter, Order::tree}, Op::sum, GetParam(),
                    {size_t(p) * 130, 0, size_t(p)}, id % 2 == 0, false, num_results, id + 1);
      ++id;
      ASSERT_NO_FATAL_FAILURE(run(processes, call));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ProcessesTreeTest,
                         ::testing::Values(DType::u8, DType::s32, DType::f32, DType::bf16, DType::f64),
                         [](const auto& info) { return name_of(info.param); });

// So little memory that a round has room for some of the parts only.
TEST(ProcessesTree, LittleMemory) {
  uint64_t id = 0;
  for (DType dtype : {DType::bf16, DType::f32}) {
    for (const auto& [process_of_rank, num_shards] :
         std::vector<std::pair<std::vector<int64_t>, int>>{{{0, 1, 0, 1, 0, 1, 0, 1}, 24}, {{0, 0, 0, 1}, 92}}) {
      Processes processes(process_of_rank, {1024, 128});
      const int p = processes.num_ranks();
      for (Collective collective : {Collective::all_reduce, Collective::reduce_scatter}) {
        for (bool one_shot : {false, true}) {
          TreeCall call(all_of(num_shards, p), {collective, Order::tree}, Op::sum, dtype, {size_t(p) * 200, size_t(p)},
                        one_shot, false, 1, ++id);
          ASSERT_NO_FATAL_FAILURE(run(processes, call));
        }
      }
    }
  }
}

// Large enough for streaming stores, and with the real size of the shared memory.
TEST(ProcessesTree, LargeMessages) {
  for (int num_shards : {3, 9}) {
    Processes processes({0, 0, 1}, {256 << 10, 128 << 10});
    TreeCall call(all_of(num_shards, 3), {Collective::all_reduce, Order::tree}, Op::sum, DType::f32, {400'001, 5},
                  false, false, 1, num_shards);
    ASSERT_NO_FATAL_FAILURE(run(processes, call));
  }
}

// A group's memory serves calls with and without a tree, and with different trees, one after the other.
TEST(ProcessesTree, LoopsOfCalls) {
  Processes processes({0, 0, 1, 1});
  std::vector<std::unique_ptr<TreeCall>> trees;
  const int repeats = 300 / kSlowdown;
  for (int i = 0; i < repeats; ++i) {
    const Plan plan{i % 3 == 0 ? Collective::reduce_scatter : Collective::all_reduce,
                    i % 2 ? Order::tree : Order::rank};
    const Shards shards = all_of(i % 2 ? 4 * (i % 7 + 1) : 4, 4);
    trees.push_back(std::make_unique<TreeCall>(shards, plan, Op::max, DType::s32, std::vector<size_t>{4 * (i % 9u)},
                                               i % 5 == 0, false, 1, i + 1));
  }
  on_all(processes.count(), [&](int process) {
    for (auto& call : trees) call->submit(processes[process]);
  });
  for (auto& call : trees) ASSERT_NO_FATAL_FAILURE(call->expect_results());
}

}  // namespace
}  // namespace jax_ring::shm
