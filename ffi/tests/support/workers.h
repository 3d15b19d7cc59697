// workers.h: threads for the engine, one per task.
#pragma once

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/engine.h"

namespace jax_ring::cpu::testing {

class Threads final : public Workers {
 public:
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return 3; }
  void schedule(std::function<void()> task) override { threads_.emplace_back(std::move(task)); }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace jax_ring::cpu::testing
