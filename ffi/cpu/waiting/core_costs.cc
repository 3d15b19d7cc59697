// core_costs.cc: two threads take turns, on two cores and on one.
#include "cpu/waiting/core_costs.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "base/polling.h"
#include "base/threads.h"
#include "cpu/waiting/cores.h"

namespace jax_ring::cpu {
namespace {

constexpr int kRepeats = 15;
constexpr int kTurns = 2000;

void bind_to_core(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  sched_setaffinity(0, sizeof(only), &only);
}

// The time of two turns, one per thread: the minimum over repeats, since other programs only add to it.
template <class Wait>
double seconds_of_two_turns(std::array<int, 2> cores, Wait wait) {
  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    alignas(64) std::atomic<int> turn(0);
    double elapsed = 0;
    // Both threads exist until joined, so neither waits in vain.
    const auto take_turns = [&](int first) {
      bind_to_core(cores[first]);
      SteadyClock::time_point begin;
      for (int i = first; i < 2 * kTurns; i += 2) {
        while (turn.load(std::memory_order_acquire) != i) wait();
        // The first turns may still wait for the other thread to start.
        if (i == 20) begin = SteadyClock::now();
        turn.store(i + 1, std::memory_order_release);
      }
      if (first == 0) elapsed = std::chrono::duration<double>(SteadyClock::now() - begin).count();
    };
    std::thread one(take_turns, 0), other(take_turns, 1);
    one.join();
    other.join();
    least = std::min(least, elapsed / (kTurns - 10));
  }
  return least;
}

}  // namespace

CoreCosts core_costs() {
  CoreCosts costs;
  const std::vector<int> cores = usable_cores();
  if (cores.empty()) return costs;
  if (cores.size() > 1) costs.round_trip = seconds_of_two_turns({cores.front(), cores.back()}, cpu_relax);
  costs.context_switch = seconds_of_two_turns({cores.front(), cores.front()}, sched_yield) / 2;
  return costs;
}

}  // namespace jax_ring::cpu
