// busy_test.cc: two simultaneous calls of one rank in one lane: the second one fails, and no result is wrong.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

bool is_poisoned(OffsetBuffer& buffer) {
  return std::all_of(buffer.data(), buffer.data() + buffer.size(), [](unsigned char b) { return b == 0xff; });
}

// Gives up after a second, so that a test fails and does not hang.
template <class Word>
void wait_until_set(Word& word) {
  const DeviceAtomic<Word> value(word);
  for (int i = 0; i < 1000 && value.load() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class Busy : public ::testing::TestWithParam<Algorithm> {
 protected:
  static Capacity capacity(int num_ctas) {
    Capacity capacity = small_capacity(2);
    capacity.num_ctas = num_ctas;
    return capacity;
  }
  PeerCall call(unsigned seed) const {
    PeerCall call = PeerCall::random(DType::u32, GetParam(), {}, 2, {8}, seed);
    call.fingerprint = 5;  // two calls of the same kind, which no tag tells apart
    return call;
  }
};
INSTANTIATE_TEST_SUITE_P(, Busy, ::testing::Values(Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring));

TEST_P(Busy, ACallIntoABusyLaneFails) {
  Peers peers(capacity(2));
  Progress& running = peers.endpoint(0).progress[1];
  running.turn = Progress::kBusy;  // the other call's second team is still running
  std::vector<PeerCall> calls = {call(1)};
  peers.run(calls, {0}, 0.2);
  const Failure& failure = peers.failure(0);
  // Whichever of its teams fails first, the call has failed, and reports it if it is the second team.
  if (failure.cta == 1) {
    EXPECT_EQ(failure.kind, static_cast<uint32_t>(FailureKind::busy));
  }
  EXPECT_EQ(failure.rank, 0);
  EXPECT_EQ(failure.call, 7u);
  EXPECT_TRUE(is_poisoned(calls[0].outputs[0][0]));
  EXPECT_TRUE(running.is_busy()) << "the lane belongs to the other call";
  EXPECT_EQ(running.one_shot_epoch() + running.round + running.sent, 0u);
}

TEST_P(Busy, TheFailureSaysWhy) {
  Peers peers(capacity(1));
  peers.endpoint(0).progress[0].turn = Progress::kBusy;
  const Bytes before = peers.mailbox(1);
  std::vector<PeerCall> calls = {call(1)};
  peers.run(calls, {0}, 5);  // without a wait
  EXPECT_EQ(peers.failure(0).kind, static_cast<uint32_t>(FailureKind::busy));
  EXPECT_EQ(peers.failure(0).step, static_cast<uint32_t>(Step::start));
  EXPECT_EQ(peers.mailbox(1), before) << "a call that may not run has sent something";
}

TEST_P(Busy, ACallThatEndsFreesItsLane) {
  Peers peers(capacity(2));
  std::vector<PeerCall> calls = {call(1), call(2)};
  peers.run(calls);
  for (int rank : {0, 1}) {
    for (int cta : {0, 1}) EXPECT_FALSE(peers.progress(rank, cta).is_busy());
  }
  std::vector<PeerCall> alone = {call(3)};
  peers.run(alone, {0}, 0.1);
  EXPECT_EQ(peers.failure(0).kind, static_cast<uint32_t>(FailureKind::timeout));
  for (int cta : {0, 1}) EXPECT_FALSE(peers.progress(0, cta).is_busy()) << "a call that failed has ended as well";
}

// Equal calls with equal tags. Without the flag, rank 1 gets the second call's data for the first one.
TEST_P(Busy, TheSecondCallDoesNotTouchTheFirst) {
  Peers peers(capacity(1));
  std::vector<PeerCall> one = {call(1)}, other = {call(2)};
  const auto expected = one[0].expected();
  std::thread first([&] { peers.run(one, {0}, 5); });
  wait_until_set(peers.endpoint(0).progress[0].turn);
  std::thread second([&] { peers.run(other, {0}, 5); });
  wait_until_set(peers.endpoint(0).failure->kind);
  peers.run(one, {1}, 0.2);
  first.join();
  second.join();
  EXPECT_EQ(peers.failure(0).kind, static_cast<uint32_t>(FailureKind::busy));
  EXPECT_TRUE(is_poisoned(other[0].outputs[0][0]));
  OffsetBuffer& output = one[0].outputs[1][0];
  EXPECT_TRUE(is_poisoned(output) || std::equal(expected[1][0].begin(), expected[1][0].end(), output.data()));
}

}  // namespace
}  // namespace jax_ring::cpu::testing
