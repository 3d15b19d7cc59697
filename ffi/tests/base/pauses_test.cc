// pauses_test.cc: the running time of a process, by a clock of the test.
#include "base/pauses.h"

#include <gtest/gtest.h>

#include <chrono>

namespace jax_ring {
namespace {

using std::chrono::seconds;

constexpr seconds kInterval{1};

Pauses::Time at(int second) { return Pauses::Time(seconds(100 + second)); }

// Looks each second, except while the process is stopped.
struct Looks {
  void run(int from, int to) {
    for (int second = from; second <= to; ++second) pauses.look(at(second), kInterval);
  }
  Pauses pauses;
};

TEST(Pauses, ThereIsNoneBeforeTheFirstLook) {
  Pauses pauses;
  EXPECT_EQ(pauses.run_since(at(0), at(50)), seconds(50));
  pauses.look(at(60), kInterval);
  EXPECT_EQ(pauses.run_since(at(0), at(61)), seconds(61));
}

TEST(Pauses, AreNotCounted) {
  Looks looks;
  looks.run(0, 3);
  // Stopped for 20 s, one second of which counts as running.
  looks.run(23, 25);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(25)), seconds(25 - 19));
  EXPECT_EQ(looks.pauses.run_since(at(10), at(25)), seconds(25 - 10 - 13));
  EXPECT_EQ(looks.pauses.run_since(at(23), at(25)), seconds(2));
}

// Any thread may come first after a pause.
TEST(Pauses, AreSeenByThoseWhoAsk) {
  Looks looks;
  looks.run(0, 3);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(23)), seconds(4));
  looks.run(23, 25);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(25)), seconds(25 - 19)) << "once";
}

TEST(Pauses, ALittleLateIsNone) {
  Looks looks;
  for (int second = 0; second <= 20; second += 2) looks.run(second, second);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(20)), seconds(20));
}

TEST(Pauses, SeveralAddUp) {
  Looks looks;
  looks.run(0, 1);
  looks.run(11, 12);
  looks.run(22, 23);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(23)), seconds(23 - 9 - 9));
  EXPECT_EQ(looks.pauses.run_since(at(15), at(23)), seconds(23 - 15 - 7));
}

// A process that runs for a moment now and then reaches each deadline.
TEST(Pauses, TheDeadlineComesAtLast) {
  Looks looks;
  int turn = 0;
  for (looks.run(0, 0); looks.pauses.run_since(at(0), at(100 * turn)) < seconds(60); ++turn) {
    ASSERT_LE(turn, 60);
    looks.run(100 * turn, 100 * turn);
  }
  EXPECT_EQ(turn, 60);
}

// The asking thread has read the clock before another one that came first.
TEST(Pauses, TimesOutOfOrder) {
  Looks looks;
  looks.run(0, 3);
  EXPECT_EQ(looks.pauses.run_since(at(0), at(24)), seconds(4));
  EXPECT_EQ(looks.pauses.run_since(at(0), at(23)), seconds(4));
  EXPECT_EQ(looks.pauses.run_since(at(0), at(2)), seconds(2));
  EXPECT_EQ(looks.pauses.run_since(at(0), at(25)), seconds(5));
}

// As in the watchdog, after a shorter deadline has been set.
TEST(Pauses, AnotherInterval) {
  Pauses pauses;
  pauses.look(at(0), seconds(10));
  pauses.look(at(3), kInterval);
  EXPECT_EQ(pauses.run_since(at(0), at(13)), seconds(4));
}

}  // namespace
}  // namespace jax_ring
