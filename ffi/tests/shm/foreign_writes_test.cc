// foreign_writes_test.cc: whatever a process writes into its part of a group's memory, the others stay within their own
// memory, and report an error that the runtime takes.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "base/printable.h"
#include "recorder/flight_recorder.h"
#include "recorder/flight_table.h"
#include "shm/exchange/channel.h"
#include "shm/peers/arrivals.h"
#include "tests/support/processes.h"
#include "tests/support/reference.h"

namespace jax_ring::shm {
namespace {

// The failure of process 0's call, where process 1 has posted this status and aborted the group for this reason.
CallFailure failure_beside(const std::string& status, const CallFailure& why, bool joins, bool leaves) {
  Processes processes({0, 1});
  Channel other(processes.heap().first.get(), 2, 1, kSmall);
  if (joins) other.join();
  other.post_status(status);
  other.abort(why, leaves);
  GroupCall call({DType::f32, {10}, {}, Op::sum}, 2, false, false, 1, {});
  call.submit(processes[0]);
  EXPECT_TRUE(call.outcome(0).wait());
  return call.outcome(0).failure();
}

TEST(ForeignWrites, AnUnknownReasonIsAnErrorAllTheSame) {
  for (int64_t number : {int64_t{0}, int64_t{-1}, int64_t{1000}, int64_t{1} << 40}) {
    for (bool leaves : {false, true}) {
      CallFailure why;
      why.code = static_cast<ErrorCode>(number);
      why.kind = static_cast<CallFailure::Kind>(number == 0 ? -7 : number);
      why.process = why.rank = -5;
      const CallFailure failure = failure_beside("call 1", why, true, leaves);
      EXPECT_EQ(failure.code, ErrorCode::internal) << number;
      EXPECT_GE(static_cast<int>(failure.kind), 0) << number;
      EXPECT_LT(static_cast<int>(failure.kind), static_cast<int>(CallFailure::Kind::count)) << number;
      EXPECT_GE(failure.process, CallFailure::kNone) << number;
      EXPECT_GE(failure.rank, CallFailure::kNone) << number;
    }
  }
}

TEST(ForeignWrites, KnownReasonsArePassedOn) {
  for (ErrorCode code : {ErrorCode::invalid_argument, ErrorCode::resource_exhausted, ErrorCode::failed_precondition}) {
    CallFailure why;
    why.code = code;
    EXPECT_EQ(failure_beside("call 1", why, true, false).code, code);
  }
}

TEST(ForeignWrites, ATextIsEscaped) {
  for (const bool joins : {true, false}) {
    for (const bool leaves : {false, true}) {
      const CallFailure failure = failure_beside("\xff\x1b[2J\ncaf\xc3\xa9", {}, joins, leaves);
      EXPECT_EQ(failure.text, printable(failure.text)) << "joins " << joins << ", leaves " << leaves;
      EXPECT_NE(failure.text.find("\\xff\\x1b[2J\\x0acaf\xc3\xa9"), std::string::npos) << failure.text;
      EXPECT_EQ(failure.cause, printable(failure.cause));
    }
  }
}

// Two processes' views of a group that can grow. The first one may be of another build, with more levels.
class ForeignGrowth : public ::testing::Test {
 protected:
  const Capacities more_{{2048, 1024}, {8192, 4096}, {32768, 16384}, {65536, 16384}, {65536, 32768}};
  const std::shared_ptr<Heap> heap_ = std::make_shared<Heap>();
  const Memory first_ = zeroed_memory(Channel::bytes(2, kGrowing));
  HeapSegments of_leader_{heap_, 0}, of_other_{heap_, 1};
  Channel leader_{first_.get(), 2, 0, more_, &of_leader_}, other_{first_.get(), 2, 1, kGrowing, &of_other_};
};

TEST_F(ForeignGrowth, ASegmentOfAnUnknownLevelIsRefused) {
  for (int level : {3, 4}) {
    ASSERT_TRUE(leader_.offer_growth(level));
    const int opened = heap_->num_opened;
    other_.accept_growth();
    EXPECT_EQ(heap_->num_opened, opened) << "a level of no known size";
    other_.finish_growth();
    EXPECT_EQ(other_.level(), 0);
  }
}

// The offer that a process has mapped counts, not one that has come since.
TEST_F(ForeignGrowth, AnOfferThatChangesIsRefused) {
  ASSERT_TRUE(leader_.offer_growth(1));
  other_.accept_growth();
  ASSERT_TRUE(leader_.offer_growth(2));
  Channel(first_.get(), 2, 1, kGrowing, &of_other_).accept_growth();
  other_.finish_growth();
  EXPECT_LE(other_.level(), 1) << "it has mapped the smaller segment";
}

TEST_F(ForeignGrowth, ASegmentThatAProcessCouldNotMapIsNotUsed) {
  heap_->cannot_open = {1};
  ASSERT_TRUE(leader_.offer_growth(1));
  other_.accept_growth();
  heap_->cannot_open = {};
  Channel(first_.get(), 2, 1, kGrowing, &of_other_).accept_growth();
  unsigned char* const before = other_.staging(1, 1, false);
  other_.finish_growth();
  EXPECT_EQ(other_.level(), 0);
  EXPECT_EQ(other_.staging(1, 1, false), before);
}

// The counters of the ranks that came last are behind an array.
TEST(ForeignWrites, ARankThatIsNoneIsNotCounted) {
  flight::Recorder& recorder = flight::Recorder::instance();
  flight::RecordedCall* const call = recorder.add("a call", "all_reduce", {{{0, 1}, {0, 1}}});
  ASSERT_NE(call, nullptr);
  const int64_t now = flight::nanoseconds_now();
  for (uint64_t rank : {uint64_t{2}, uint64_t{60'000}}) {
    flight::Entry entry;
    entry.enter(call, recorder.memory(), 0, now);
    entry.become_ready(0, now);
    const uint64_t later = static_cast<uint64_t>(now + 1000) << 16 | rank;
    end_entry(entry, Group({0, 1}, 0), {0, later});
    const auto totals = call->statistics->read(true);
    ASSERT_EQ(totals.late.size(), 2u);
    EXPECT_EQ(totals.late[0].count, 1u) << "the last rank that is known";
    EXPECT_EQ(totals.late[1].count, 0u);
  }
}

}  // namespace
}  // namespace jax_ring::shm
