// tree_algorithm_test.cc: sums along a tree between threads, with the GPU kernels' code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "device/algorithm.h"
#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

// A tree over shards, and a group's ranks among the ranks that hold them.
struct SharedTree {
  int num_shards, num_ranks;
  std::vector<int> ranks;
};

SharedTree among_all(int num_shards, int num_ranks) {
  std::vector<int> ranks(num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  return {num_shards, num_ranks, ranks};
}

Tree tree_of(const SharedTree& what) { return Tree(what.num_shards, what.num_ranks, what.ranks); }
ReferenceTree reference_of(const SharedTree& what) {
  return ReferenceTree(what.num_shards, what.num_ranks, what.ranks);
}

std::string name_of(const SharedTree& what) {
  std::string name =
      std::to_string(what.num_shards) + " shards of " + std::to_string(what.num_ranks) + " ranks, in the group";
  for (int rank : what.ranks) name += " " + std::to_string(rank);
  return name;
}

// ---- The program of the kernels

using F64 = Native<double>;

// Runs the kernels' code for one pack. value_of(member, slot) is the value of both its elements.
template <class ValueOf>
std::vector<double> run_program(const TreeProgram& program, ValueOf value_of) {
  std::vector<double> results;
  for (int result = 0; result < program.num_results; ++result) {
    const auto load = [&](int first, int) {
      Pieces<F64> pieces{};
      for (int i = 0; i < kTermsInFlight<F64>; ++i) {
        if (!program.exists(first + i)) continue;
        const double value = value_of(program.member(first + i), program.slot(first + i));
        pieces.piece[i] = {{bit_cast<uint64_t>(value), bit_cast<uint64_t>(value)}};
      }
      return pieces;
    };
    const Pack pack = fold_tree<F64>(program, result, load, Sum{});
    EXPECT_EQ(pack.word[0], pack.word[1]);
    results.push_back(bit_cast<double>(pack.word[0]));
  }
  return results;
}

// With numbers of very different sizes, so that any other order gives a different sum.
void expect_same_sums(const SharedTree& what, const TreeProgram& program, std::mt19937& random) {
  const ReferenceTree reference = reference_of(what);
  std::vector<uint64_t> values(what.ranks.size() * reference.num_slots());
  for (uint64_t& value : values) {
    value = bit_cast<uint64_t>(std::ldexp(std::normal_distribution<double>()(random), random() % 50));
  }
  const auto got = run_program(program, [&](int member, int slot) {
    return bit_cast<double>(values.at(member * reference.num_slots() + slot));
  });
  const auto& roots = reference.roots();
  ASSERT_EQ(program.num_roots, roots.size()) << name_of(what);
  for (size_t result = 0; result < got.size(); ++result) {
    const uint64_t want = evaluate(DType::f64, roots[std::min(result, roots.size() - 1)], values, Op::sum);
    ASSERT_EQ(bit_cast<uint64_t>(got[result]), want) << name_of(what) << ", result " << result;
  }
}

TEST(TreeProgram, AddsAsItsDefinitionUpTo64Shards) {
  std::mt19937 random(1);
  for (int num_shards = 1; num_shards <= 64; ++num_shards) {
    for (int num_ranks = 1; num_ranks <= num_shards; ++num_ranks) {
      if (num_shards % num_ranks != 0) continue;
      const SharedTree what = among_all(num_shards, num_ranks);
      const auto program = TreeCompiler::compile(tree_of(what), 1);
      ASSERT_TRUE(program.has_value()) << name_of(what);
      expect_same_sums(what, *program, random);
    }
  }
}

TEST(TreeProgram, AddsTheSumsOfAnyGroup) {
  std::mt19937 random(2);
  int served = 0;
  for (int i = 0; i < 2000; ++i) {
    const int num_ranks = 1 + random() % 32, num_shards = num_ranks * (1 + random() % 12);
    SharedTree what{num_shards, num_ranks, {}};
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (random() % 4 != 0) what.ranks.push_back(rank);
    }
    if (what.ranks.empty()) continue;
    const Tree tree = tree_of(what);
    const auto program = TreeCompiler::compile(tree, static_cast<int>(tree.roots().size()) + random() % 2);
    if (!program) continue;
    ++served;
    expect_same_sums(what, *program, random);
  }
  EXPECT_GT(served, 1000);
}

TEST(TreeProgram, ServesSoManyRanks) {
  const auto serves = [](int num_shards, int num_ranks) {
    return TreeCompiler::compile(tree_of(among_all(num_shards, num_ranks)), 1).has_value();
  };
  for (int num_ranks = 1; num_ranks <= kMaxRanks; ++num_ranks) {
    for (int each : {1, 2, 4, 1 << 10}) EXPECT_TRUE(serves(each * num_ranks, num_ranks)) << num_ranks;
  }
  for (int num_ranks = 1; num_ranks <= 21; ++num_ranks) EXPECT_TRUE(serves(3 * num_ranks, num_ranks)) << num_ranks;
  for (int each = 1; each <= 8; ++each) EXPECT_TRUE(serves(each * 8, 8)) << each;
  EXPECT_FALSE(serves(3 * 64, 64)) << "more than 16 blocks";
  EXPECT_FALSE(serves(2 * 64 - 1, 127)) << "four sums on the stack";
  EXPECT_FALSE(serves(2 * ((1 << 20) - 1), 2)) << "more than 16 slots";
}

// ---- Calls

struct Call {
  Algorithm algorithm = Algorithm::two_shot;
  Plan plan = {Collective::all_reduce, Order::tree};
  DType dtype = DType::f32;
  SharedTree tree;
  std::vector<size_t> counts = {300};  // elements of one slot of each operand
  int more_results = 0;                // beyond the group's own number
};

// Two packs of each slot in a round.
Capacity capacity_for(int num_ranks, int num_slots) {
  Capacity capacity = small_capacity(num_ranks);
  capacity.one_shot_packs = 2 * num_slots + 1;
  capacity.part_packs = 2 * num_slots + 1;
  return capacity;
}

// Operands of random elements, also in slots that a rank does not use.
PeerCall peer_call(const Call& what, unsigned seed, size_t offset = 0) {
  const Tree tree = tree_of(what.tree);
  const int p = static_cast<int>(what.tree.ranks.size()), slots = tree.num_slots();
  const int results = static_cast<int>(tree.roots().size()) + what.more_results;
  PeerCall call{what.dtype, Op::sum, what.algorithm, what.plan, seed + 1, what.counts, {}, {}};
  call.tree = TreeCompiler::compile(tree, results);
  EXPECT_TRUE(call.tree.has_value()) << name_of(what.tree);
  call.inputs.resize(p);
  call.outputs.resize(p);
  for (size_t i = 0; i < what.counts.size(); ++i) {
    const auto elements = random_elements(what.dtype, p * slots, what.counts[i], seed + 17 * static_cast<unsigned>(i));
    const size_t result_bytes = results * result_count(what.plan, p, what.counts[i]) * element_size(what.dtype);
    for (int rank = 0; rank < p; ++rank) {
      Bytes operand;
      for (int slot = 0; slot < slots; ++slot) operand.append(elements[rank * slots + slot]);
      call.inputs[rank].emplace_back(operand, offset);
      call.outputs[rank].emplace_back(Bytes(result_bytes, 0xa5), offset);
    }
  }
  return call;
}

// By rank and operand.
std::vector<std::vector<Bytes>> expected(const Call& what, PeerCall& call) {
  std::vector<std::vector<Bytes>> all(call.num_ranks());
  for (size_t operand = 0; operand < what.counts.size(); ++operand) {
    std::vector<Bytes> operands;
    for (auto& of_rank : call.inputs) {
      operands.emplace_back(of_rank[operand].data(), of_rank[operand].data() + of_rank[operand].size());
    }
    for (int rank = 0; rank < call.num_ranks(); ++rank) {
      all[rank].push_back(expected_tree_result(what.plan, Op::sum, what.dtype, reference_of(what.tree), operands,
                                               what.counts[operand], call.tree->num_results, rank));
    }
  }
  return all;
}

// Runs the calls, all of one group, back to back, and checks them all.
void check(const std::vector<Call>& calls, int threads = 1, size_t offset = 0, bool in_place = false) {
  int num_slots = 1;
  for (const Call& call : calls) num_slots = std::max(num_slots, tree_of(call.tree).num_slots());
  const int p = static_cast<int>(calls[0].tree.ranks.size());
  Peers peers(capacity_for(p, num_slots), 0xffffffffu - 9, threads);
  std::vector<PeerCall> peer_calls;
  std::vector<std::vector<std::vector<Bytes>>> want;
  for (const Call& call : calls) {
    peer_calls.push_back(peer_call(call, static_cast<unsigned>(peer_calls.size()), offset));
    peer_calls.back().in_place = in_place;
    want.push_back(expected(call, peer_calls.back()));
  }
  peers.run(peer_calls);
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(name_of(calls[i].tree));
    expect_results(peer_calls[i], want[i]);
  }
}

struct Shape {
  int ranks;
  int threads;  // of each team
};
const Shape kShapes[] = {{1, 1}, {2, 3}, {3, 1}, {3, 2}, {5, 1}, {6, 1}, {8, 2}, {9, 1}};

std::string name_of(Algorithm algorithm) { return algorithm == Algorithm::one_shot ? "one_shot" : "two_shot"; }

class Along : public ::testing::TestWithParam<std::tuple<Algorithm, Shape>> {
 protected:
  Algorithm algorithm() const { return std::get<0>(GetParam()); }
  int num_ranks() const { return std::get<1>(GetParam()).ranks; }
  int threads() const { return std::get<1>(GetParam()).threads; }
};
INSTANTIATE_TEST_SUITE_P(Tree, Along,
                         ::testing::Combine(::testing::Values(Algorithm::one_shot, Algorithm::two_shot),
                                            ::testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           const Shape shape = std::get<1>(info.param);
                           return name_of(std::get<0>(info.param)) + "_" + std::to_string(shape.ranks) +
                                  "_ranks_teams_of_" + std::to_string(shape.threads);
                         });

TEST_P(Along, AllReducesOfEverySize) {
  std::vector<Call> calls;
  for (int each : {1, 2, 3, 7}) {
    const SharedTree tree = among_all(each * num_ranks(), num_ranks());
    for (size_t count : {0, 1, 5, 31, 32, 33, 150}) {
      calls.push_back({algorithm(), {Collective::all_reduce, Order::tree}, DType::f32, tree, {count, 3}});
    }
  }
  check(calls, threads());
}

TEST_P(Along, EveryDtype) {
  std::vector<Call> calls;
  for (DType dtype : all_dtypes()) {
    if (is_signed_integer(dtype)) continue;  // summed as unsigned
    for (int each : {1, 3}) {
      const SharedTree tree = among_all(each * num_ranks(), num_ranks());
      calls.push_back({algorithm(), {Collective::all_reduce, Order::tree}, dtype, tree, {133}});
    }
  }
  check(calls, threads());
}

TEST_P(Along, AnyAlignmentAndInPlace) {
  for (bool in_place : {false, true}) {
    std::vector<Call> calls;
    const SharedTree tree = among_all((in_place ? 1 : 3) * num_ranks(), num_ranks());
    for (size_t count : {50, 101}) {
      calls.push_back({algorithm(), {Collective::all_reduce, Order::tree}, DType::bf16, tree, {count}});
    }
    check(calls, threads(), 6, in_place);
  }
}

TEST(Tree, OfManyRanks) {
  for (int num_ranks : {17, 21, 33}) {
    std::vector<Call> calls;
    for (Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot}) {
      for (DType dtype : {DType::f32, DType::f16, DType::f8e4m3fn}) {
        const SharedTree tree = among_all(num_ranks <= 21 ? 3 * num_ranks : num_ranks, num_ranks);
        calls.push_back({algorithm, {Collective::all_reduce, Order::tree}, dtype, tree, {60}});
      }
    }
    check(calls);
  }
}

TEST(Tree, ReducesAndScatters) {
  for (int num_ranks : {1, 2, 3, 8}) {
    std::vector<Call> calls;
    for (int each : {1, 3, 4}) {
      const SharedTree tree = among_all(each * num_ranks, num_ranks);
      for (size_t per_rank : {0, 1, 4, 33, 70}) {
        const std::vector<size_t> counts = {per_rank * num_ranks, static_cast<size_t>(num_ranks)};
        const Plan to_last{Collective::reduce, Order::tree, num_ranks - 1};
        calls.push_back({Algorithm::two_shot, {Collective::reduce_scatter, Order::tree}, DType::f32, tree, counts});
        calls.push_back({Algorithm::two_shot, to_last, DType::bf16, tree, counts});
      }
    }
    check(calls, num_ranks == 3 ? 2 : 1);
  }
}

// The part of one host: a reduce-scatter with one result per sum that remains in the group.
TEST(Tree, ScattersThePartsOfAGroup) {
  for (const std::vector<int>& ranks : {std::vector<int>{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 2, 4, 6}, {1, 2, 5}, {7}}) {
    std::vector<Call> calls;
    for (int num_shards : {8, 24, 56}) {
      for (int more_results : {0, 2}) {
        Call call;
        call.plan = {Collective::reduce_scatter, Order::tree};
        call.tree = {num_shards, 8, ranks};
        call.counts = {40 * ranks.size(), 3 * ranks.size()};
        call.more_results = more_results;
        calls.push_back(call);
      }
    }
    check(calls, 2);
  }
}

// Adding the ranks' values one after the other gives a different sum: a test that could not tell would show nothing.
TEST(Tree, IsNotTheOrderOfRanks) {
  const Call what{Algorithm::two_shot, {Collective::all_reduce, Order::tree}, DType::f32, among_all(4, 4), {300}};
  PeerCall along_tree = peer_call(what, 1);
  PeerCall by_rank = PeerCall::random(DType::f32, Algorithm::two_shot, Plan{}, 4, {300}, 1);
  for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(along_tree.inputs[rank][0] == by_rank.inputs[rank][0]);
  EXPECT_TRUE(
      first_difference(DType::f32, expected(what, along_tree)[0][0].data(), by_rank.expected()[0][0].data(), 300));
}

class Fails : public ::testing::TestWithParam<Algorithm> {};
INSTANTIATE_TEST_SUITE_P(Tree, Fails, ::testing::Values(Algorithm::one_shot, Algorithm::two_shot),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Fails, NamesTheMissingRank) {
  const bool scatters = GetParam() == Algorithm::two_shot;
  Call what;
  what.algorithm = GetParam();
  what.plan = {scatters ? Collective::reduce_scatter : Collective::all_reduce, Order::tree};
  what.tree = scatters ? SharedTree{24, 8, {1, 2, 4, 7}} : among_all(12, 4);
  std::vector<PeerCall> calls = {peer_call(what, 1)};
  Peers peers(capacity_for(4, tree_of(what.tree).num_slots()), 0, 2);
  peers.run(calls, {0, 1, 3}, 0.2);
  bool named = false;
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(peers.failure(rank).kind, static_cast<uint32_t>(FailureKind::timeout)) << rank;
    named = named || peers.failure(rank).peer == 2;
    OffsetBuffer& output = calls[0].outputs[rank][0];
    EXPECT_TRUE(std::all_of(output.data(), output.data() + output.size(), [](unsigned char b) { return b == 0xff; }))
        << rank;
  }
  EXPECT_TRUE(named);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
