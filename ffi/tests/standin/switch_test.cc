// switch_test.cc: groups whose mailboxes have a multicast address: values through the whole engine, refusals by the
// driver, and leftovers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "tests/standin/program/fixture.h"
#include "tests/standin/runtime/multicast.h"

namespace jax_ring::standin {
namespace {

// With the option that a user sets.
class Switch : public StandinTest {
 protected:
  void SetUp() override { setenv("JAX_RING_MULTICAST", "1", 1); }
  void TearDown() override {
    StandinTest::TearDown();
    unsetenv("JAX_RING_MULTICAST");
    EXPECT_EQ(num_driver_objects(), 0u);
  }

  CallSpec any_order(size_t count, DType dtype = DType::f32) const {
    CallSpec what{members(), 1, {Collective::all_reduce, Order::any}, {count}, dtype};
    what.call = "a sum of " + std::to_string(count);
    return what;
  }
};

// Above one-shot's default limit.
constexpr size_t kLarge = 70000;

// Sums in the switch, between other calls of the same lane and of another lane.
std::deque<Call> calls_of(const CallSpec& any_order) {
  std::deque<Call> calls;
  const auto add = [&](CallSpec what) { calls.emplace_back(std::move(what), static_cast<unsigned>(calls.size())); };
  add(any_order);
  for (Order order : {Order::rank, Order::any}) {
    CallSpec what = any_order;
    what.plan.order = order;
    what.counts = {kLarge + 1, 3, kLarge};
    add(what);
    what.lane = 1;
    what.dtype = DType::bf16;
    what.counts = {2 * kLarge + 5};
    add(what);
    what.lane = 0;
    what.dtype = DType::s32;
    what.counts = {100};
    add(what);
  }
  CallSpec gather = any_order;
  gather.plan = {Collective::all_gather};
  gather.counts = {99};
  add(gather);
  add(any_order);
  return calls;
}

class Values : public Switch, public ::testing::WithParamInterface<std::tuple<int, Mode>> {};
INSTANTIATE_TEST_SUITE_P(, Values,
                         ::testing::Combine(::testing::Values(2, 3), ::testing::Values(Mode::stream, Mode::recorded)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_gpus_" +
                                  (std::get<1>(info.param) == Mode::stream ? "stream" : "recorded");
                         });

TEST_P(Values, AreThoseOfTheDefinition) {
  start({std::get<0>(GetParam())});
  std::deque<Call> calls = calls_of(any_order(kLarge));
  std::vector<Call*> all;
  for (Call& call : calls) all.push_back(&call);
  Program program(0, *gpus_, all, std::get<1>(GetParam()));
  for (int run = 0; run < 3; ++run) program.run_and_check();
  EXPECT_EQ(Machine::instance().num_calls("cuMulticastCreate"), 2u) << "one for each lane";
}

TEST_F(Switch, IsOffByDefault) {
  unsetenv("JAX_RING_MULTICAST");
  start({2});
  Call call(any_order(kLarge), 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
  EXPECT_EQ(Machine::instance().num_calls("cuMulticastCreate"), 0u);
}

TEST_F(Switch, OneGpuNeedsNone) {
  Hardware hardware{1};
  hardware.has_multicast = false;
  start(hardware);
  Call call(any_order(kLarge), 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
}

TEST_F(Switch, GpusWithoutMulticastAreAnErrorThatSaysWhatToDo) {
  Hardware hardware{2};
  hardware.has_multicast = false;
  start(hardware);
  Call call(any_order(kLarge), 1);
  Program program(0, *gpus_, {&call});
  for (const std::string& error : program.run()) {
    EXPECT_TRUE(says(error, "JAX_RING_MULTICAST=1 asks for multicast memory for GPU 100 of process 0, GPU 93"));
    EXPECT_TRUE(says(error, "the GPU with CUDA ordinal 0 has none. Unset JAX_RING_MULTICAST"));
  }
}

TEST_F(Switch, AnotherValueOfTheOptionIsAnError) {
  setenv("JAX_RING_MULTICAST", "yes", 1);
  start({2});
  Call call(any_order(kLarge), 1);
  Program program(0, *gpus_, {&call});
  for (const std::string& error : program.run()) {
    EXPECT_TRUE(says(error, "JAX_RING_MULTICAST must be 1 or 0, got 'yes'"));
  }
}

// The first or the second call of each function fails. Nothing of that attempt is left, and the next one works.
class Refusals : public Switch, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(, Refusals,
                         ::testing::Values("cuMulticastGetGranularity", "cuMulticastCreate", "cuMulticastAddDevice",
                                           "cuMulticastBindMem", "cuMemCreate", "cuMemAddressReserve", "cuMemMap",
                                           "cuMemSetAccess", "cudaMemsetAsync"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Refusals, AreNamedAndASecondAttemptWorks) {
  const std::string function = GetParam();
  const bool is_once = function == "cuMulticastGetGranularity" || function == "cuMulticastCreate";
  for (int after = 0; after < (is_once ? 1 : 2); ++after) {
    start({2});
    Machine::instance().fail(function, cudaErrorMemoryAllocation, 1, after);
    Call call(any_order(kLarge), 1);
    {
      Program program(0, *gpus_, {&call});
      for (const std::string& error : program.run()) EXPECT_TRUE(says(error, function));
      program.run_and_check();
    }
    StandinTest::TearDown();
    EXPECT_EQ(num_driver_objects(), 0u);
  }
}

}  // namespace
}  // namespace jax_ring::standin
