// tree_test.cc: Order::tree, from the shape of the tree to the results of the engine, against a recursion over its
// nodes.
#include "collective/tree.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "attributes/trees.h"
#include "cpu/engine.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

constexpr int kMostShards = 64;

std::vector<int> range(int count) {
  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  return all;
}

// A random non-empty part of the ranks, in ascending order.
std::vector<int> some_ranks(int num_ranks, std::mt19937& random) {
  std::vector<int> ranks;
  while (ranks.empty()) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (random() % 3 > 0) ranks.push_back(rank);
    }
  }
  return ranks;
}

// Calls visit(num_shards, num_ranks) for every tree of up to kMostShards shards.
template <class Visit>
void for_each_tree(Visit visit) {
  for (int num_shards = 1; num_shards <= kMostShards; ++num_shards) {
    for (int num_ranks = 1; num_ranks <= num_shards; ++num_ranks) {
      if (num_shards % num_ranks == 0) visit(num_shards, num_ranks);
    }
  }
}

// A stack machine's result for a root's terms, as text.
std::string run_terms(const Tree& tree, const Tree::Root& root) {
  std::vector<std::string> stack;
  for (int i = root.first; i < root.first + root.num_terms; ++i) {
    const TreeTerm& term = tree.terms()[i];
    stack.push_back(std::to_string(term.member * tree.num_slots() + term.slot));
    for (int merge = 0; merge < term.merges; ++merge) {
      const std::string right = stack.back();
      stack.pop_back();
      stack.back() = "(" + stack.back() + "+" + right + ")";
    }
  }
  return stack.size() == 1 ? stack[0] : "not one sum";
}

TEST(Tree, TermsAndRootsFollowTheDefinition) {
  std::mt19937 random(1);
  for_each_tree([&](int num_shards, int num_ranks) {
    for (int turn = 0; turn < 3; ++turn) {
      const std::vector<int> ranks = turn == 0 ? range(num_ranks) : some_ranks(num_ranks, random);
      SCOPED_TRACE(::testing::Message() << num_shards << " shards, " << num_ranks << " ranks, of which "
                                        << ::testing::PrintToString(ranks));
      const Tree tree(num_shards, num_ranks, ranks);
      const ReferenceTree reference(num_shards, num_ranks, ranks);
      ASSERT_EQ(tree.num_slots(), reference.num_slots());
      ASSERT_EQ(tree.roots().size(), reference.roots().size());
      if (turn == 0) {
        ASSERT_EQ(tree.roots().size(), 1u);
      }
      for (size_t i = 0; i < tree.roots().size(); ++i) {
        ASSERT_EQ(run_terms(tree, tree.roots()[i]), reference.roots()[i].text());
      }
    }
  });
}

// In words: 6 shards are 4 and 2, and a rank of 3 has the first three as 2 and 1, the others as 1 and 2.
TEST(Tree, OfSixShards) {
  EXPECT_EQ(ReferenceTree(6, 6, range(6)).roots()[0].text(), "(((0+1)+(2+3))+(4+5))");
  EXPECT_EQ(ReferenceTree(6, 2, range(2)).roots()[0].text(), "((0+(1+2))+3)");
  EXPECT_EQ(ReferenceTree(6, 1, range(1)).roots()[0].text(), "0");
  EXPECT_EQ(ReferenceTree(7, 7, {0, 1, 3, 4, 5, 6}).roots().size(), 3u);
}

// One thread per task.
class Threads final : public Workers {
 public:
  explicit Threads(int num_threads) : num_threads_(num_threads) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return num_threads_; }
  void schedule(std::function<void()> task) override { threads_.emplace_back(std::move(task)); }

 private:
  int num_threads_;
  std::vector<std::thread> threads_;
};

// A call in a group of some ranks of a tree.
struct Setting {
  int num_shards;
  int num_ranks;
  std::vector<int> ranks;  // of the group's members
  int num_results = 1;
  int num_threads = 1;
  bool in_place = false;
};

std::vector<Bytes> operands_for(const Setting& setting, DType dtype, size_t count) {
  const int slots = Tree(setting.num_shards, setting.num_ranks, setting.ranks).num_slots();
  const int size = static_cast<int>(setting.ranks.size());
  return random_elements(dtype, size, slots * count, static_cast<unsigned>(count + setting.num_shards));
}

// The results of one collective, by operand, then member. operands: likewise. counts: elements of one slot.
std::vector<std::vector<Bytes>> run_tree(const Plan& plan, Op op, DType dtype, const Setting& setting,
                                         const std::vector<size_t>& counts,
                                         const std::vector<std::vector<Bytes>>& operands) {
  const Tree tree(setting.num_shards, setting.num_ranks, setting.ranks);
  const int num_ranks = static_cast<int>(setting.ranks.size());
  std::vector<std::vector<OffsetBuffer>> inputs, outputs;
  std::vector<Outcome> outcomes(num_ranks);
  RendezvousPtr rendezvous(new Rendezvous);
  rendezvous->num_arrived = num_ranks;
  for (size_t operand = 0; operand < counts.size(); ++operand) {
    const size_t bytes = result_count(plan, num_ranks, counts[operand]) * setting.num_results * element_size(dtype);
    inputs.emplace_back();
    outputs.emplace_back();
    for (const Bytes& of_rank : operands[operand]) {
      inputs.back().emplace_back(of_rank, 0);
      outputs.back().emplace_back(Bytes(bytes, 0xa5), 0);
    }
    for (int i = 0; i < 2 * num_ranks; ++i) rendezvous->inputs.push_back(inputs.back()[i % num_ranks].data());
    for (auto& output : (setting.in_place ? inputs : outputs).back()) rendezvous->outputs.push_back(output.data());
  }
  for (const Outcome& of_rank : outcomes) rendezvous->done.push_back(of_rank.completion());
  {
    Threads workers(setting.num_threads);
    run_collective(std::move(rendezvous), {dtype, counts, plan, op, &tree, setting.num_results}, workers);
    for (const Outcome& of_rank : outcomes) EXPECT_TRUE(of_rank.wait());
  }
  std::vector<std::vector<Bytes>> results(counts.size());
  for (size_t operand = 0; operand < counts.size(); ++operand) {
    for (auto& output : (setting.in_place ? inputs : outputs)[operand]) {
      results[operand].emplace_back(output.data(), output.data() + outputs[operand][0].size());
    }
  }
  return results;
}

void expect_tree(const Plan& plan, Op op, DType dtype, const Setting& setting, const std::vector<size_t>& counts) {
  SCOPED_TRACE(::testing::Message() << name_of(dtype) << ", op " << static_cast<int>(op) << ", " << setting.num_shards
                                    << " shards, " << setting.num_ranks << " ranks, of which "
                                    << ::testing::PrintToString(setting.ranks) << ", collective "
                                    << static_cast<int>(plan.collective) << ", root " << plan.root);
  std::vector<std::vector<Bytes>> operands;
  for (size_t count : counts) operands.push_back(operands_for(setting, dtype, count));
  const auto results = run_tree(plan, op, dtype, setting, counts, operands);
  const ReferenceTree reference(setting.num_shards, setting.num_ranks, setting.ranks);
  for (size_t operand = 0; operand < counts.size(); ++operand) {
    for (size_t member = 0; member < setting.ranks.size(); ++member) {
      const Bytes want = expected_tree_result(plan, op, dtype, reference, operands[operand], counts[operand],
                                              setting.num_results, static_cast<int>(member));
      const Bytes& got = results[operand][member];
      ASSERT_EQ(got.size(), want.size());
      const auto difference = first_difference(dtype, got.data(), want.data(), want.size() / element_size(dtype));
      ASSERT_FALSE(difference) << "member " << member << ", operand " << operand << ", element " << *difference;
    }
  }
}

constexpr Collective kReductions[] = {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce};

// Every tree, in one type. The size is more than a block of vectors, and leaves a remainder.
TEST(TreeFold, OfEveryTree) {
  int turn = 0;
  for_each_tree([&](int num_shards, int num_ranks) {
    const Collective collective = kReductions[++turn % 3];
    const size_t count = collective == Collective::reduce_scatter ? 21 * num_ranks : 67;
    const Plan plan{collective, Order::tree, collective == Collective::reduce ? num_ranks - 1 : 0};
    ASSERT_NO_FATAL_FAILURE(
        expect_tree(plan, Op::sum, DType::f32, {num_shards, num_ranks, range(num_ranks)}, {count, 0}));
  });
}

// Groups without all ranks: the results are the sums of their largest nodes.
TEST(TreeFold, OfSomeRanks) {
  std::mt19937 random(2);
  for (int num_shards : {2, 3, 6, 8, 12, 24, 40, 64}) {
    for (int num_ranks = 1; num_ranks <= num_shards; ++num_ranks) {
      if (num_shards % num_ranks != 0) continue;
      const std::vector<int> ranks = some_ranks(num_ranks, random);
      const int roots = static_cast<int>(Tree(num_shards, num_ranks, ranks).roots().size());
      // The number of results of another group, too.
      for (int num_results : {roots, roots + 2}) {
        ASSERT_NO_FATAL_FAILURE(expect_tree({Collective::reduce_scatter, Order::tree}, Op::sum, DType::bf16,
                                            {num_shards, num_ranks, ranks, num_results},
                                            {33 * ranks.size(), ranks.size()}));
      }
    }
  }
}

class TreeFoldTest : public ::testing::TestWithParam<DType> {};

TEST_P(TreeFoldTest, OfEveryCollective) {
  int turn = 0;
  for (const auto& [num_shards, num_ranks] : {std::pair(3, 3), {4, 4}, {8, 8}, {6, 2}, {24, 3}, {24, 8}}) {
    for (Collective collective : kReductions) {
      for (int root : {0, num_ranks / 2}) {
        if (root > 0 && collective != Collective::reduce) continue;
        const Op op = turn % 2 == 0 ? Op::sum : static_cast<Op>(turn % 3);
        Setting setting{num_shards, num_ranks, range(num_ranks), 1, ++turn % 3};
        const size_t p = num_ranks;
        ASSERT_NO_FATAL_FAILURE(
            expect_tree({collective, Order::tree, root}, op, GetParam(), setting, {67 * p, 0, p, 1024 * p}));
        // Results in the place of the operands.
        setting.in_place = num_shards == num_ranks && collective != Collective::reduce_scatter;
        if (!setting.in_place) continue;
        ASSERT_NO_FATAL_FAILURE(expect_tree({collective, Order::tree, root}, op, GetParam(), setting, {1, 1000}));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, TreeFoldTest, ::testing::ValuesIn(all_dtypes()), dtype_name);

// Larger than a chunk, than the limit for a single thread, and than the caches.
TEST(TreeFold, DoesNotDependOnThreads) {
#if defined(__SANITIZE_THREAD__)
  const std::vector<int> numbers_of_threads{4};  // several: one thread has no races
#else
  const std::vector<int> numbers_of_threads{1, 4};
#endif
  for (const auto& [num_shards, num_ranks] : {std::pair(4, 4), {12, 4}}) {
    for (Collective collective : kReductions) {
      for (int num_threads : numbers_of_threads) {
        ASSERT_NO_FATAL_FAILURE(expect_tree({collective, Order::tree}, Op::sum, DType::f32,
                                            {num_shards, num_ranks, range(num_ranks), 1, num_threads},
                                            {4 * 70'003, 4}));
      }
    }
  }
}

// All ways to put parentheses around values [first, first + count).
std::vector<Expression> associations(int first, int count) {
  if (count == 1) return {Expression{first, {}}};
  std::vector<Expression> all;
  for (int left = 1; left < count; ++left) {
    for (const Expression& a : associations(first, left)) {
      for (const Expression& b : associations(first + left, count - left)) all.push_back({-1, {a, b}});
    }
  }
  return all;
}

// Values for which any other association gives different bits, in types that round.
TEST(TreeFold, NoOtherAssociationGivesItsBits) {
  constexpr size_t kCount = 500;
  std::mt19937 random(3);
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::f8e5m2}) {
    // Two of the values are large and cancel. Values added to one of them before that lose digits, which shows in any
    // precision of the result.
    const int digits = dtype == DType::f64 ? 53 : 24;
    const int least = dtype == DType::f16 || dtype == DType::f8e5m2 ? -10 : 0;
    const double large = std::ldexp(1.0, least + digits + 1);
    for (int size = 3; size <= 7; ++size) {
      const Setting setting{size, size, range(size)};
      std::vector<Bytes> operands(size, Bytes(kCount * element_size(dtype)));
      for (size_t i = 0; i < kCount; ++i) {
        std::vector<double> values;
        for (int rank = 0; rank < size; ++rank) {
          const double fraction = static_cast<double>(random() % 1024) / 1024;
          values.push_back(std::ldexp(1 + fraction, least + static_cast<int>(random() % 4)));
        }
        const int first = static_cast<int>(random() % size);
        values[first] = large;
        values[(first + 1 + random() % (size - 1)) % size] = -large;
        for (int rank = 0; rank < size; ++rank) {
          set_element(dtype, operands[rank].data(), i, element_of(dtype, values[rank]));
        }
      }
      const Bytes got =
          run_tree({Collective::all_reduce, Order::tree}, Op::sum, dtype, setting, {kCount}, {operands})[0][0];
      const std::string tree = ReferenceTree(size, size, range(size)).roots()[0].text();
      int equal = 0;
      for (const Expression& association : associations(0, size)) {
        Bytes other(got.size());
        for (size_t i = 0; i < kCount; ++i) {
          std::vector<uint64_t> elements;
          for (const Bytes& of_rank : operands) elements.push_back(element_bits(dtype, of_rank.data(), i));
          set_element(dtype, other.data(), i, evaluate(dtype, association, elements, Op::sum));
        }
        const bool is_equal = !first_difference(dtype, got.data(), other.data(), kCount);
        EXPECT_EQ(is_equal, association.text() == tree) << name_of(dtype) << ": " << association.text();
        equal += is_equal;
      }
      EXPECT_EQ(equal, 1) << name_of(dtype) << ", " << size << " ranks";
    }
  }
}

// ---- The attributes of a custom call -------------------------------------------------------------------------------

using Numbers = std::vector<int64_t>;

std::string refusal(const Plan& plan, const Numbers& group_sizes, const Numbers& tree_shards, const Numbers& tree_sizes,
                    const Numbers& tree_ranks) {
  try {
    trees_of(plan, group_sizes, tree_shards, tree_sizes, tree_ranks);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(TreesOf, HasATreeForEachGroup) {
  const Plan plan{Collective::reduce_scatter, Order::tree};
  const Trees trees = trees_of(plan, Numbers{2, 3}, Numbers{8, 24}, Numbers{2, 4}, Numbers{0, 1, 0, 1, 3});
  ASSERT_EQ(trees.of_group.size(), 2u);
  EXPECT_EQ(trees.of_group[0].num_slots(), 1);
  EXPECT_EQ(trees.of_group[0].roots().size(), 1u);
  EXPECT_EQ(trees.of_group[1].num_slots(), ReferenceTree(24, 4, {0, 1, 3}).num_slots());
  EXPECT_EQ(trees.of_group[1].roots().size(), ReferenceTree(24, 4, {0, 1, 3}).roots().size());
  EXPECT_EQ(trees.num_results, static_cast<int>(trees.of_group[1].roots().size()));
  // Calls with another order, and calls that only move data, have none.
  EXPECT_TRUE(
      trees_of({Collective::all_reduce, Order::rank}, Numbers{2}, Numbers{}, Numbers{}, Numbers{}).of_group.empty());
  EXPECT_TRUE(
      trees_of({Collective::all_gather, Order::tree}, Numbers{2}, Numbers{}, Numbers{}, Numbers{}).of_group.empty());
}

TEST(TreesOf, RefusesWhatIsNoTree) {
  const Plan plan{Collective::all_reduce, Order::tree};
  EXPECT_EQ(refusal(plan, {2}, {4}, {2}, {0, 1}), "");
  for (const auto& [shards, sizes, ranks] : {std::tuple(Numbers{}, Numbers{}, Numbers{}),
                                             {Numbers{4}, Numbers{}, Numbers{0, 1}},
                                             {Numbers{4}, Numbers{2}, Numbers{0}}}) {
    EXPECT_NE(refusal(plan, {2}, shards, sizes, ranks).find("needs a tree for each of the 1 groups"),
              std::string::npos);
  }
  for (const auto& [shards, size] : {std::pair(5, 2), {1, 2}, {0, 2}, {4, 0}, {(1 << 24) + 2, 2}}) {
    EXPECT_EQ(refusal(plan, {2}, {shards}, {size}, {0, 1}),
              std::to_string(size) + " ranks cannot hold equally many of " + std::to_string(shards) + " shards");
  }
  for (const Numbers& ranks : {Numbers{1, 0}, {0, 0}, {0, 2}, {-1, 0}}) {
    EXPECT_NE(refusal(plan, {2}, {4}, {2}, ranks).find("ranks of its tree in ascending order"), std::string::npos);
  }
  // Ranks 0 and 2 of 4 have two partial sums.
  EXPECT_NE(refusal(plan, {2}, {4}, {4}, {0, 2}).find("only a reduce-scatter returns"), std::string::npos);
  EXPECT_EQ(refusal({Collective::reduce_scatter, Order::tree}, {2}, {4}, {4}, {0, 2}), "");
}

}  // namespace
}  // namespace jax_ring::cpu::testing
