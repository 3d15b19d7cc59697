// fixture.h: a test of one process with absent GPUs, and of the engine's leftovers.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/groups/communicators.h"
#include "cuda/runtime/gpus.h"
#include "tests/standin/program/program.h"
#include "tests/standin/runtime/machine.h"
#include "tests/standin/runtime/memory.h"

namespace jax_ring::standin {

// JAX's ids of the GPUs: not their CUDA ordinals, and not in their order.
inline int64_t id_of_gpu(int process, int gpu) { return 100 * (process + 1) - 7 * gpu; }

inline gpu::Communicators& engine() { return gpu::Communicators::instance(); }

// The engine in a process with these GPUs. Nothing of an earlier engine may be in use.
inline std::unique_ptr<Gpus> start_process(int process, const Hardware& hardware, gpu::KeyValueStore store,
                                           double deadline) {
  Machine::instance().reset(hardware);
  static gpu::Gpus* const runtime = gpu::cuda_gpus().release();
  engine().set_gpus(runtime);
  engine().set_process(process, std::move(store));
  engine().set_deadline(deadline);
  std::vector<int64_t> ids;
  std::map<int, int64_t> by_ordinal;
  std::vector<int> all;
  for (int gpu = 0; gpu < hardware.num_gpus; ++gpu) {
    ids.push_back(id_of_gpu(process, gpu));
    by_ordinal[gpu] = ids.back();
    all.push_back(gpu);
  }
  engine().device_ids().set([by_ordinal] { return by_ordinal; });
  Machine::instance().expect_loaded_together(all);
  return std::make_unique<Gpus>(ids);
}

// Whether there is an error with this text in it.
inline ::testing::AssertionResult says(const std::string& error, const std::string& text) {
  if (error.find(text) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" is not in the error \"" << error << '"';
}

// Waits until at most this many allocations exist. A thread that looks for failures may hold a group for a moment
// longer.
inline ::testing::AssertionResult releases_memory(size_t most) {
  for (int i = 0; i < 2000 && Memory::instance().count() > most; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const size_t count = Memory::instance().count();
  if (count <= most) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << count - most << " allocations were not released";
}

class StandinTest : public ::testing::Test {
 protected:
  // A kernel's longest wait in tests with all ranks present. Much less would fail under slow sanitizers.
  static constexpr double kDeadline = 15;

  void start(const Hardware& hardware, double deadline = kDeadline, gpu::KeyValueStore store = {}) {
    gpus_ = start_process(0, hardware, std::move(store), deadline);
    allocations_before_ = Memory::instance().count();
  }

  // This process's GPUs, as members of a group.
  std::vector<gpu::Member> members(int count = 0) const {
    std::vector<gpu::Member> all;
    for (int gpu = 0; gpu < (count == 0 ? gpus_->count() : count); ++gpu) all.push_back({0, id_of_gpu(0, gpu)});
    return all;
  }

  void TearDown() override {
    engine().reset();
    gpus_.reset();
    if (!keeps_memory_) {
      EXPECT_TRUE(releases_memory(allocations_before_));
    }
    for (const std::string& each : Machine::instance().violations()) ADD_FAILURE() << each;
  }

  std::unique_ptr<Gpus> gpus_;
  size_t allocations_before_ = 0;
  bool keeps_memory_ = false;  // another process may have mapped it
};

}  // namespace jax_ring::standin
