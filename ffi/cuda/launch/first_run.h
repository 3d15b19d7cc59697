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

// Number of first runs: XLA runs a program once, and creates its CUDA graphs in the second run.
constexpr size_t kFirstRuns = 2;

// A barrier in each of the first runs that reach it: no rank passes before all ranks have arrived in that run. After
// these runs nobody waits.
class FirstRun {
 public:
  // what: the work that the ranks have finished on arrival; ranks: their names. Both for errors.
  FirstRun(std::string what, std::vector<std::string> ranks);

  // Reports this rank's arrival, without waiting. run: identifies an execution of the program, which includes every
  // rank. May be repeated.
  void arrive(int64_t run, int rank);

  // Waits for the others. Throws std::runtime_error if one of them fails in this run, or does not arrive in time.
  void arrive_and_wait(int64_t run, int rank, double deadline_seconds);

  // Reports that this rank will not arrive in this run, so that the others do not wait for it.
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
  std::map<int64_t, Run> open_;  // and failed runs, so that a late rank learns of the failure
  std::set<int64_t> completed_;
};

}  // namespace jax_ring::gpu
