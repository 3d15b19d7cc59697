// algorithm_test.cc: one-shot, two-shot and ring collectives between threads, with the GPU kernels' code.
#include "device/algorithm.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

struct Variant {
  Algorithm algorithm;
  Order order;
  const char* name;
  Plan plan() const { return {Collective::all_reduce, order}; }
};

const Variant kVariants[] = {
    {Algorithm::one_shot, Order::rank, "one_shot"},
    {Algorithm::two_shot, Order::rank, "two_shot"},
    {Algorithm::ring, Order::rank, "ring_in_rank_order"},
    {Algorithm::ring, Order::ring, "ring"},
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

// A group of ranks whose teams have this many threads. Many threads on few cores slow the tests down.
struct Shape {
  int ranks;
  int threads;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int ranks : kRanks) all.push_back({ranks, 1});
  all.insert(all.end(), {{1, 3}, {2, 2}, {2, 3}, {3, 2}, {4, 3}, {5, 3}, {8, 2}});
  return all;
}

std::string name_of(const Shape& shape) {
  return std::to_string(shape.ranks) + "_ranks" +
         (shape.threads == 1 ? "" : "_teams_of_" + std::to_string(shape.threads));
}

Peers peers_of(const Shape& shape, uint32_t first = 0) {
  return Peers(small_capacity(shape.ranks), first, shape.threads);
}

// Runs the calls back to back, and checks them all.
void check(Peers& peers, std::vector<PeerCall> calls) {
  std::vector<std::vector<std::vector<Bytes>>> expected;
  for (PeerCall& call : calls) expected.push_back(call.expected());
  peers.run(calls);
  for (size_t i = 0; i < calls.size(); ++i) expect_results(calls[i], expected[i]);
}

class AllReduce : public ::testing::TestWithParam<std::tuple<Variant, Shape>> {
 protected:
  Variant variant() const { return std::get<0>(GetParam()); }
  Shape shape() const { return std::get<1>(GetParam()); }
  int num_ranks() const { return shape().ranks; }
  PeerCall call(DType dtype, std::vector<size_t> counts, unsigned seed, size_t offset = 0) const {
    return PeerCall::random(dtype, variant().algorithm, variant().plan(), num_ranks(), std::move(counts), seed, offset);
  }
};

INSTANTIATE_TEST_SUITE_P(, AllReduce, ::testing::Combine(::testing::ValuesIn(kVariants), ::testing::ValuesIn(shapes())),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" + name_of(std::get<1>(info.param));
                         });

TEST_P(AllReduce, SizesAroundEveryBoundary) {
  const size_t p = num_ranks();
  const Capacity capacity = small_capacity(num_ranks());
  const size_t per_pack = kPackBytes / sizeof(float);
  // One round of one team, of each algorithm, in elements.
  const size_t rounds[] = {capacity.one_shot_packs * per_pack, capacity.part_packs * p * per_pack,
                           capacity.slot_packs * per_pack, capacity.slot_packs * p * per_pack};
  std::vector<size_t> counts = {0, 1, p - 1, p, p + 1, per_pack * p, per_pack * p + 1};
  for (size_t round : rounds) {
    for (size_t teams : {size_t{1}, static_cast<size_t>(capacity.num_ctas)}) {
      counts.insert(counts.end(), {round * teams - 1, round * teams, round * teams + 1});
    }
  }
  counts.push_back(7 * capacity.slot_packs * p * per_pack + 3);
  Peers peers = peers_of(shape());
  std::vector<PeerCall> calls;
  for (size_t count : counts) calls.push_back(call(DType::f32, {count}, static_cast<unsigned>(calls.size())));
  check(peers, std::move(calls));
}

TEST_P(AllReduce, EveryDtype) {
  Peers peers = peers_of(shape());
  std::vector<PeerCall> calls;
  for (DType dtype : all_dtypes()) {
    if (is_signed_integer(dtype)) continue;  // summed as unsigned
    calls.push_back(call(dtype, {333}, static_cast<unsigned>(calls.size())));
  }
  check(peers, std::move(calls));
}

TEST_P(AllReduce, AnyAlignmentAndInPlace) {
  Peers peers = peers_of(shape());
  std::vector<PeerCall> calls;
  for (size_t offset : {4, 8, 12}) {
    for (bool in_place : {false, true}) {
      calls.push_back(call(DType::f32, {101}, static_cast<unsigned>(calls.size()), offset));
      calls.back().in_place = in_place;
    }
  }
  check(peers, std::move(calls));
}

TEST_P(AllReduce, CountersWrapAround) {
  Peers peers = peers_of(shape(), 0xffffffffu - 9);
  std::vector<PeerCall> calls;
  for (unsigned i = 0; i < 12; ++i) calls.push_back(call(DType::u32, {60 + i}, i));
  check(peers, std::move(calls));
  if (num_ranks() == 1 && variant().algorithm == Algorithm::ring) return;  // sends nothing
  const Progress& progress = peers.progress(0, 0);
  const uint32_t counter = variant().algorithm == Algorithm::one_shot   ? progress.one_shot_epoch()
                           : variant().algorithm == Algorithm::two_shot ? progress.round
                                                                        : progress.sent;
  EXPECT_LT(counter, 1u << 20) << "the counter has not wrapped around";
}

// ---- The other collectives, in two steps

std::vector<Plan> two_step_plans(int num_ranks) {
  return {{Collective::reduce_scatter, Order::rank},
          {Collective::reduce_scatter, Order::ring},
          {Collective::all_gather},
          {Collective::reduce, Order::rank, num_ranks - 1},
          {Collective::broadcast, Order::rank, num_ranks / 2},
          {Collective::all_to_all},
          {Collective::permute, Order::rank, 0, next_rank(num_ranks)},
          {Collective::permute, Order::rank, 0, some_mirrored(num_ranks)}};
}

// The dtype of the kernels for a collective: data that is only moved is moved as bytes.
DType dtype_of(const Plan& plan, DType other = DType::f32) { return only_moves(plan) ? DType::u8 : other; }

class TwoStep : public ::testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(, TwoStep, ::testing::ValuesIn(shapes()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(TwoStep, SizesAroundEveryBoundary) {
  const size_t p = GetParam().ranks;
  const Capacity capacity = small_capacity(GetParam().ranks);
  Peers peers = peers_of(GetParam());
  std::vector<PeerCall> calls;
  for (const Plan& plan : two_step_plans(GetParam().ranks)) {
    const size_t round = capacity.part_packs * kPackBytes / element_size(dtype_of(plan)) * capacity.num_ctas;
    for (size_t per_rank : {size_t{0}, size_t{1}, size_t{3}, size_t{4}, round - 1, round, round + 1, 3 * round + 2}) {
      const size_t count = plan.collective == Collective::all_gather ? per_rank : per_rank * p;
      const unsigned seed = static_cast<unsigned>(calls.size());
      calls.push_back(PeerCall::random(dtype_of(plan), Algorithm::two_shot, plan, GetParam().ranks, {count, p}, seed));
    }
  }
  check(peers, std::move(calls));
}

TEST_P(TwoStep, ReduceAroundARing) {
  Peers peers = peers_of(GetParam());
  std::vector<PeerCall> calls;
  for (Order order : {Order::rank, Order::ring}) {
    const Plan plan{Collective::reduce, order, GetParam().ranks / 2};
    calls.push_back(PeerCall::random(DType::bf16, Algorithm::ring, plan, GetParam().ranks, {777}, 1));
  }
  check(peers, std::move(calls));
}

TEST_P(TwoStep, ExtremaOfEveryDtype) {
  Peers peers = peers_of(GetParam());
  std::vector<PeerCall> calls;
  for (DType dtype : all_dtypes()) {
    for (Op op : {Op::max, Op::min}) {
      const unsigned seed = static_cast<unsigned>(calls.size());
      calls.push_back(PeerCall::random(dtype, Algorithm::two_shot, {}, GetParam().ranks, {99}, seed, 0, op));
    }
  }
  check(peers, std::move(calls));
}

// ---- All algorithms in one mailbox

TEST(Mailbox, AlgorithmsAlternate) {
  for (int num_ranks : {2, 3, 5}) {
    Peers peers = peers_of({num_ranks, 2});
    std::vector<PeerCall> calls;
    for (unsigned i = 0; i < 60; ++i) {
      const std::vector<Plan> plans = two_step_plans(num_ranks);
      const Plan plan = plans[i % plans.size()];
      calls.push_back(PeerCall::random(dtype_of(plan), Algorithm::two_shot, plan, num_ranks, {i % 7 * num_ranks}, i));
      const Variant& variant = kVariants[(i * i + i / 4) % 4];
      calls.push_back(PeerCall::random(DType::f32, variant.algorithm, variant.plan(), num_ranks, {(i * 37) % 300}, i));
    }
    check(peers, std::move(calls));
  }
}

// In ring order each operand is a call of its own.
TEST(Mailbox, ManyOperandsInOneCall) {
  std::vector<size_t> counts;
  for (size_t i = 0; i < kMaxOperands; ++i) counts.push_back(i * i % 97);
  for (int num_ranks : {1, 2, 3, 8}) {
    Peers peers = peers_of({num_ranks, num_ranks == 3 ? 3 : 1});
    std::vector<PeerCall> calls;
    for (Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring}) {
      calls.push_back(PeerCall::random(DType::bf16, algorithm, Plan{}, num_ranks, counts, 1));
      calls.push_back(PeerCall::random(DType::f64, algorithm, Plan{}, num_ranks, {0, 0, 5, 0, 1000, 0}, 2));
    }
    check(peers, std::move(calls));
  }
}

TEST(Mailbox, PartsDoNotOverlap) {
  for (int num_ranks : kRanks) {
    Capacity capacity = small_capacity(num_ranks);
    capacity.num_ctas = 3;
    std::vector<std::pair<size_t, size_t>> parts;
    for (int cta = 0; cta < capacity.num_ctas; ++cta) {
      for (FlagKind kind : {FlagKind::tail, FlagKind::head}) parts.push_back({capacity.flag(kind, cta, 0), kFlagBytes});
      for (int peer = 0; peer < num_ranks; ++peer) {
        parts.push_back({capacity.flag(FlagKind::even, cta, peer), kFlagBytes});
        parts.push_back({capacity.flag(FlagKind::odd, cta, peer), kFlagBytes});
        parts.push_back({capacity.lines(0, cta, peer), capacity.num_lines() * sizeof(Line)});
        parts.push_back({capacity.lines(1, cta, peer), capacity.num_lines() * sizeof(Line)});
        for (int buffer = 0; buffer < kScatterBuffers; ++buffer) {
          parts.push_back({capacity.scatter(buffer, cta, peer), capacity.part_packs * kPackBytes});
        }
        for (int buffer = 0; buffer < kGatherBuffers; ++buffer) {
          parts.push_back({capacity.gather(buffer, cta, peer), capacity.part_packs * kPackBytes});
        }
      }
      for (uint64_t i = 0; i < capacity.num_slots; ++i) {
        parts.push_back({capacity.slot(cta, i), (1 + capacity.slot_packs) * kPackBytes});
      }
    }
    std::sort(parts.begin(), parts.end());
    size_t end = 0;
    for (const auto& [begin, size] : parts) {
      EXPECT_EQ(begin, end);
      EXPECT_EQ(begin % kPackBytes, 0u);
      end = begin + size;
    }
    EXPECT_EQ(end, capacity.bytes());
  }
}

TEST(OneShot, NoLineKeepsItsTagForLong) {
  // A stale line with an earlier call's tag would be mistaken for a new one once the epochs have wrapped around.
  Capacity capacity = small_capacity(2);
  capacity.num_ctas = 1;
  Peers peers(capacity);
  std::vector<PeerCall> calls;
  const size_t full = capacity.one_shot_packs * kPackBytes / sizeof(float);
  for (unsigned i = 0; i < 2; ++i) {
    calls.push_back(PeerCall::random(DType::f32, Algorithm::one_shot, Plan{}, 2, {full}, i));
  }
  const unsigned rounds = static_cast<unsigned>(2 * capacity.num_lines());
  for (unsigned i = 0; i < rounds; ++i) {
    calls.push_back(PeerCall::random(DType::f32, Algorithm::one_shot, Plan{}, 2, {1}, i));
  }
  check(peers, std::move(calls));
  for (int parity = 0; parity < 2; ++parity) {
    for (uint64_t i = 0; i < capacity.num_lines(); ++i) {
      uint64_t word;
      std::memcpy(&word, peers.mailbox(0).data() + capacity.lines(parity, 0, 1) + i * sizeof(Line), sizeof(word));
      EXPECT_GT(word >> 32, 2u) << "line " << i << " of set " << parity;
    }
  }
}

// ---- Failures

class Fails : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(, Fails, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Fails, NamesTheMissingRank) {
  const int missing = 2;
  Peers peers = peers_of({4, 2});
  std::vector<PeerCall> calls;
  calls.push_back(PeerCall::random(DType::f32, GetParam().algorithm, GetParam().plan(), 4, {500}, 1));
  peers.run(calls);
  calls.push_back(PeerCall::random(DType::f32, GetParam().algorithm, GetParam().plan(), 4, {500}, 2));
  calls.erase(calls.begin());
  peers.run(calls, {0, 1, 3}, 0.2);
  bool named = false;
  for (int rank : {0, 1, 3}) {
    const Failure& failure = peers.failure(rank);
    EXPECT_EQ(failure.kind, static_cast<uint32_t>(FailureKind::timeout)) << rank;
    EXPECT_EQ(failure.rank, rank);
    EXPECT_EQ(failure.call, 7u);
    EXPECT_GT(failure.epoch, 0u);
    named = named || failure.peer == missing;
    // Nothing looks like a result: some outputs are poisoned, the others untouched.
    OffsetBuffer& output = calls[0].outputs[rank][0];
    EXPECT_TRUE(std::all_of(output.data(), output.data() + output.size(), [](unsigned char b) { return b == 0xff; }))
        << rank;
  }
  EXPECT_TRUE(named);
  EXPECT_EQ(peers.failure(missing).kind, static_cast<uint32_t>(FailureKind::none));
}

TEST_P(Fails, AFailedRankStaysFailed) {
  Peers peers = peers_of({2, 2});
  std::vector<PeerCall> calls;
  for (unsigned i = 0; i < 3; ++i) {
    calls.push_back(PeerCall::random(DType::f32, GetParam().algorithm, GetParam().plan(), 2, {200}, i));
  }
  peers.run(calls, {0}, 0.2);
  const uint32_t epoch = peers.failure(0).epoch;
  // Its peer is late. It must not continue where the first rank failed.
  peers.run(calls, {0, 1}, 0.2);
  EXPECT_EQ(peers.failure(0).epoch, epoch);
  EXPECT_EQ(calls[2].outputs[0][0].data()[0], 0xff);
}

TEST_P(Fails, DetectsMismatchedCalls) {
  Peers peers = peers_of({2, 2});
  // The ranks make different calls of the same size: without the check the result would be the sum of both.
  std::vector<PeerCall> one, other;
  one.push_back(PeerCall::random(DType::f32, GetParam().algorithm, GetParam().plan(), 2, {300}, 1));
  other.push_back(PeerCall::random(DType::f32, GetParam().algorithm, GetParam().plan(), 2, {300}, 2));
  std::thread thread([&] { peers.run(one, {0}, 5); });
  peers.run(other, {1}, 5);
  thread.join();
  int mismatches = 0;
  for (int rank : {0, 1}) {
    EXPECT_NE(peers.failure(rank).kind, static_cast<uint32_t>(FailureKind::none)) << rank;
    mismatches += peers.failure(rank).kind == static_cast<uint32_t>(FailureKind::mismatch);
  }
  EXPECT_GE(mismatches, 1);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
