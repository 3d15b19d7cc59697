// standin_test.cc: the CUDA engine as a whole, from the frames of XLA's FFI to the kernels: values, and what must never
// be done on real GPUs.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda/communicators.h"
#include "standin/machine.h"
#include "standin/memory.h"
#include "standin/program.h"

namespace jax_ring::standin {
namespace {

using gpu::Communicators;
using gpu::Member;

// GPUs 0, 1, ... of process 0, whose ids are others than their CUDA ordinals.
std::vector<Member> members(int count) {
  std::vector<Member> all;
  for (int rank = 0; rank < count; ++rank) all.push_back({0, rank});
  return all;
}

class Standin : public ::testing::Test {
 protected:
  void start(Hardware hardware, double deadline = 15) {
    Machine::instance().reset(hardware);
    std::vector<int64_t> ids;
    for (int gpu = 0; gpu < hardware.num_gpus; ++gpu) ids.push_back(gpu);
    gpus_ = std::make_unique<Gpus>(ids);
    static gpu::Gpus* const runtime = gpu::cuda_gpus().release();
    Communicators::instance().set_gpus(runtime);
    Communicators::instance().set_process(0, {});
    Communicators::instance().set_deadline(deadline);
  }
  void TearDown() override {
    Communicators::instance().reset();
    gpus_.reset();
    EXPECT_EQ(Memory::instance().count(), 0u) << "memory was not released";
    EXPECT_EQ(Machine::instance().violations(), std::vector<std::string>{});
  }
  std::unique_ptr<Gpus> gpus_;
};

TEST_F(Standin, Values) {
  start({2, 2, 2});
  Call call({members(2)}, 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
  program.run_and_check();
}

}  // namespace
}  // namespace jax_ring::standin
