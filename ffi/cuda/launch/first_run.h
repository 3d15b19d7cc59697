// first_run.h: the ranks of one process wait for each other in the first runs of a call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace jax_ring::gpu {

// How many: XLA runs a program once, and creates its CUDA graphs in the second run.
constexpr size_t kFirstRuns = 2;

// A point that no rank passes, in each of the first runs that reach it, before all ranks have reached it in that run.
// From then on nobody waits.
class FirstRun {
 public:
  // what: what the ranks have done when they are here; ranks: their names. Both for errors.
  FirstRun(std::string what, std::vector<std::string> ranks);

  // This rank is here, and need not wait. run: identifies an execution of the program, in which every rank takes part.
  // May be repeated.
  void arrive(int64_t run, int rank);

  // Waits for the others. Throws std::runtime_error if one of them fails in this run, or does not arrive in time.
  void arrive_and_wait(int64_t run, int rank, double deadline_seconds);

  // This rank will not arrive in this run: the others must not wait for it.
  void fail(int64_t run, int rank, const std::string& why);

  bool is_done() const { return done_.load(std::memory_order_acquire); }

 private:
  struct Run {
    std::set<int> arrived;
    std::string error;
    int num_waiting = 0;
  };

  bool is_over(int64_t run) const;
  Run* find_or_open(int64_t run);
  bool add(int64_t run, Run& here, int rank);
  void drop_failed_runs();
  std::string missing(const Run& run) const;

  const std::string what_;
  const std::vector<std::string> ranks_;
  std::atomic<bool> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Run> open_;  // and those that failed, so that a rank that comes late hears of it
  std::set<int64_t> completed_;
};

}  // namespace jax_ring::gpu
