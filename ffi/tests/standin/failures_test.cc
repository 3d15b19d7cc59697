// failures_test.cc: refusals by the CUDA runtime: an error with the cause on every GPU, no hang, and a second attempt
// that works.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/standin/program/fixture.h"

namespace jax_ring::standin {
namespace {

using Failures = StandinTest;

struct Refusal {
  const char* function;
  cudaError_t error;
  const char* text;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.function; }

class WhileConnecting : public StandinTest, public ::testing::WithParamInterface<std::tuple<Refusal, int>> {};
INSTANTIATE_TEST_SUITE_P(
    , WhileConnecting,
    ::testing::Combine(
        ::testing::Values(Refusal{"cudaMalloc", cudaErrorMemoryAllocation, "out of memory"},
                          Refusal{"cudaHostAlloc", cudaErrorMemoryAllocation, "out of memory"},
                          Refusal{"cudaStreamCreateWithFlags", cudaErrorMemoryAllocation, "out of memory"},
                          Refusal{"cudaMemsetAsync", cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
                          Refusal{"cudaStreamSynchronize", cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
                          Refusal{"cudaDeviceEnablePeerAccess", cudaErrorPeerAccessUnsupported, "peer access"},
                          Refusal{"cudaFuncGetAttributes", cudaErrorNoKernelImageForDevice,
                                  "cudaErrorNoKernelImageForDevice"}),
        ::testing::Values(0, 1)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).function) + "_after_" + std::to_string(std::get<1>(info.param));
    });

TEST_P(WhileConnecting, TheCauseIsNamedAndASecondAttemptWorks) {
  const auto& [refusal, after] = GetParam();
  start({3});
  Machine::instance().fail(refusal.function, refusal.error, 1, after);
  Call call({members()}, 1);
  Program program(0, *gpus_, {&call});
  int named = 0;
  for (const std::string& error : program.run()) {
    EXPECT_NE(error, "");
    named += error.find(refusal.text) != std::string::npos && error.find("train.py:7") != std::string::npos;
  }
  EXPECT_EQ(named, gpus_->count()) << "all GPUs fail, with the cause";
  program.run_and_check();
  program.run_and_check();
}

TEST_F(Failures, NoPeerAccessNamesBothGpus) {
  start({3});
  Machine::instance().sever(2, 1);
  Call call({members()}, 1);
  Program program(0, *gpus_, {&call});
  for (const std::string& error : program.run()) {
    EXPECT_TRUE(says(error, "peer access"));
    EXPECT_TRUE(says(error, std::to_string(id_of_gpu(0, 1))));
    EXPECT_TRUE(says(error, std::to_string(id_of_gpu(0, 2))));
  }
}

// The other GPU has launched, and waits in vain. Its group cannot go on, but a new one can.
TEST_F(Failures, ALaunchThatFails) {
  start({2}, 0.5);
  {
    Call call({members()}, 1);
    Program program(0, *gpus_, {&call});
    program.warm_up();
    Machine::instance().fail("cudaLaunchKernelExC", cudaErrorLaunchOutOfResources);
    const std::vector<std::string> errors = program.run();
    EXPECT_TRUE(says(errors[0] + errors[1], "cudaErrorLaunchOutOfResources"));
    call.clear_results();
    const std::vector<std::string> next = program.run();
    // The waiting GPU tells all of them.
    for (const std::string& error : next) EXPECT_TRUE(says(error, "waited 0.5 s"));
  }
  engine().reset();
  engine().set_deadline(kDeadline);
  Call call({members()}, 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
}

TEST_F(Failures, AFirstLaunchThatFails) {
  start({3}, 1);
  {
    Call call({members()}, 1);
    Program program(0, *gpus_, {&call});
    Machine::instance().fail("cudaLaunchKernelExC", cudaErrorLaunchOutOfResources, 1, 1);
    for (const std::string& error : program.run()) EXPECT_TRUE(says(error, "cudaErrorLaunchOutOfResources"));
  }
  engine().reset();
  engine().set_deadline(kDeadline);
  Call call({members()}, 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
}

// No later call would raise a failure of the last step.
TEST_F(Failures, OfTheLastStepCanBeRead) {
  start({2}, 0.3);
  Call call({members()}, 1);
  Program program(0, *gpus_, {&call});
  program.warm_up();
  EXPECT_EQ(engine().failures(), std::vector<std::string>{});
  EXPECT_EQ(program.run({0})[0], "");
  EXPECT_TRUE(call.is_poisoned(call.place_of(0, id_of_gpu(0, 0))));
  const std::vector<std::string> failures = engine().failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_TRUE(says(failures[0], "waited 0.3 s"));
  EXPECT_TRUE(says(failures[0], "train.py:7"));
}

}  // namespace
}  // namespace jax_ring::standin
