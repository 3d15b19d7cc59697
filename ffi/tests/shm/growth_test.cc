// growth_test.cc: groups whose memory grows with their calls, or cannot, and processes that cannot map any.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "tests/support/processes.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::shm {
namespace {

class SumCall : public GroupCall {
 public:
  SumCall(int num_ranks, size_t count, bool one_shot, uint64_t id)
      : GroupCall({DType::f32, {count}, {}, Op::sum}, num_ranks, false, one_shot, id,
                  [](const std::vector<Bytes>& operands, size_t count, int rank) {
                    return expected_result({}, Op::sum, DType::f32, operands, count, rank);
                  }) {}
};

void expect_sum(Processes& processes, size_t count, uint64_t id) {
  SumCall call(processes.num_ranks(), count, id % 2 == 0, id);
  on_all(processes.count(), [&](int process) { call.submit(processes[process]); });
  ASSERT_NO_FATAL_FAILURE(call.expect_results());
}

constexpr size_t kLarge = 12'000, kMedium = 700, kLittle = 10;  // float32s

TEST(Growth, ACallGetsTheRoomThatItNeeds) {
  Processes processes({0, 1, 1, 2}, kGrowing);
  Heap& heap = processes.heap();
  uint64_t id = 0;
  for (int i = 0; i < 3; ++i) expect_sum(processes, kLittle, ++id);
  EXPECT_EQ(heap.num_created, 0);
  for (int i = 0; i < 3; ++i) expect_sum(processes, kMedium, ++id);
  EXPECT_EQ(heap.num_created, 1);
  EXPECT_EQ(heap.num_opened, 2);
  for (int i = 0; i < 3; ++i) expect_sum(processes, kLarge, ++id);
  EXPECT_EQ(heap.num_created, 2);
  EXPECT_EQ(heap.num_opened, 4);
  for (size_t count : {kLittle, kMedium, kLarge}) expect_sum(processes, count, ++id);
  EXPECT_EQ(heap.num_created, 2);
  EXPECT_TRUE(heap.larger.empty()) << "a name was left behind";
}

TEST(Growth, GoesOnWithLessIfThereIsNoRoom) {
  for (size_t room : {size_t{0}, size_t{60'000}}) {
    Processes processes({0, 1}, kGrowing);
    Heap& heap = processes.heap();
    heap.room = room;
    for (uint64_t id = 1; id <= 40; ++id) expect_sum(processes, kLarge, id);
    EXPECT_EQ(heap.num_created, room == 0 ? 0 : 1) << "of the middle size, which fits";
    EXPECT_LE(heap.num_refused, 2 * 8) << "not at each call";
    EXPECT_GE(heap.num_refused, 5) << "there may be room later";
  }
}

TEST(Growth, GoesOnWithLessIfAProcessCannotMapMore) {
  for (int process : {1, 2}) {
    Processes processes({0, 1, 2}, kGrowing);
    Heap& heap = processes.heap();
    heap.cannot_open = {process};
    for (uint64_t id = 1; id <= 50; ++id) expect_sum(processes, id % 3 == 0 ? kLittle : kLarge, id);
    EXPECT_LE(heap.num_created, 8);
    heap.cannot_open = {};
    for (uint64_t id = 51; id <= 120; ++id) expect_sum(processes, kLarge, id);
    const int created = heap.num_created;
    for (uint64_t id = 121; id <= 124; ++id) expect_sum(processes, kLarge, id);
    EXPECT_EQ(heap.num_created, created) << "it has grown by then";
    EXPECT_TRUE(heap.larger.empty());
  }
}

// Idle groups give their memory back after the leader, and get it again.
TEST(Growth, IdleMemoryIsGivenBack) {
  Processes processes({0, 1, 2}, kGrowing);
  Heap& heap = processes.heap();
  const auto release = [&](int process) { processes[process].release_idle_memory(); };
  uint64_t id = 0;
  for (int leader_first : {1, 0}) {
    expect_sum(processes, kLarge, ++id);
    std::weak_ptr<unsigned char> grown = heap.last;
    heap.last.reset();
    for (int process : {0, 1, 2}) release(process);
    EXPECT_FALSE(grown.expired()) << "it has just been used";
    if (leader_first) {
      for (int process : {0, 1, 2}) release(process);
      EXPECT_TRUE(grown.expired());
    } else {
      for (int process : {2, 0, 1}) release(process);
      EXPECT_FALSE(grown.expired()) << "process 2 could not know yet that the leader would";
    }
    expect_sum(processes, kLittle, ++id);
    EXPECT_TRUE(grown.expired());
    EXPECT_EQ(heap.num_created, leader_first ? 1 : 2);
  }
  // A process that cannot map it again.
  expect_sum(processes, kLarge, ++id);
  heap.last.reset();
  release(0);
  release(0);
  heap.cannot_open = {1};
  for (int i = 0; i < 3; ++i) expect_sum(processes, kLarge, ++id);
}

// A leader that is killed while it creates a segment, or before all have mapped it.
TEST(Growth, OthersRemoveTheSegmentOfADeadLeader) {
  for (bool while_creating : {true, false}) {
    auto heap = std::make_shared<Heap>();
    const Memory first = zeroed_memory(Channel::bytes(2, kGrowing));
    HeapSegments of_leader(heap, 0), of_other(heap, 1);
    Channel leader(first.get(), 2, 0, kGrowing, &of_leader), other(first.get(), 2, 1, kGrowing, &of_other);
    if (while_creating) heap->after_create = [&] { other.abort(); };
    ASSERT_TRUE(leader.offer_growth(1));
    if (!while_creating) {
      EXPECT_EQ(heap->larger.size(), 1u);
      other.abort();
    }
    EXPECT_EQ(heap->num_created, 1);
    EXPECT_TRUE(heap->larger.empty());
  }
}

// A round of one part must have room for a cache line for each of a rank's up to 48 terms.
TEST(Growth, TheFirstSegmentIsEnoughForAnyTree) {
  for (int per_process : {1, 4, 8}) {
    std::vector<int64_t> process_of_rank;
    for (int rank = 0; rank < 2 * per_process; ++rank) process_of_rank.push_back(rank / per_process);
    const Capacities levels = capacities_of(Group(process_of_rank, 0));
    for (const Capacity& capacity : levels) EXPECT_GE(capacity.staging, size_t{48} * 64 * per_process) << per_process;
    EXPECT_LT(levels.front().staging, levels.back().staging);
  }
}

TEST(Growth, OthersHearAtOnceWhoCannotMapAny) {
  Processes processes({0, 1, 2}, kGrowing);
  processes.heap().failures[1] =
      CallFailure::of(CallFailure::Kind::resources, "could not open it.", ErrorCode::resource_exhausted);
  SumCall call(3, kLittle, false, 1);
  for (int process : {0, 2}) call.submit(processes[process]);
  for (int rank : {0, 2}) {
    ASSERT_TRUE(call.outcome(rank).wait());
    EXPECT_EQ(call.outcome(rank).failure().code, ErrorCode::resource_exhausted) << call.outcome(rank).error();
  }
  const std::string error = call.outcome(0).error() + call.outcome(2).error();
  EXPECT_NE(error.find("Process 1 (rank 1) could not open it."), std::string::npos) << error;
  call.submit(processes[1]);
  ASSERT_TRUE(call.outcome(1).wait());
  EXPECT_EQ(call.outcome(1).failure().code, ErrorCode::resource_exhausted);
  EXPECT_EQ(call.outcome(1).error().rfind("call 1: could not open it.", 0), 0u) << call.outcome(1).error();
}

}  // namespace
}  // namespace jax_ring::shm
