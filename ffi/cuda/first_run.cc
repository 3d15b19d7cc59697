// first_run.cc: a rendezvous of the ranks of one process.
#include "cuda/first_run.h"

#include <stdexcept>
#include <utility>

#include "cuda/deadline.h"

namespace jax_ring::gpu {
namespace {

// Runs that failed are remembered, so that a rank that comes late hears of it.
constexpr size_t kMaxRuns = 16;

}  // namespace

FirstRun::FirstRun(std::string what, std::vector<std::string> ranks)
    : what_(std::move(what)), ranks_(std::move(ranks)), done_(ranks_.size() <= 1) {}

void FirstRun::arrive_and_wait(int64_t run, int rank, double deadline_seconds) {
  if (is_done()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_done()) return;
  Run& here = runs_[run];
  here.arrived.insert(rank);
  if (here.error.empty() && here.arrived.size() == ranks_.size()) {
    done_.store(true, std::memory_order_release);
    lock.unlock();
    changed_.notify_all();
    return;
  }
  ++here.num_waiting;
  const bool in_time =
      changed_.wait_for(lock, duration_of(deadline_seconds), [&] { return is_done() || !here.error.empty(); });
  --here.num_waiting;
  if (is_done()) return;
  if (!in_time) {
    here.error = "waited " + std::to_string(static_cast<int64_t>(deadline_seconds)) + " s in the first run for " +
                 missing(here) + " to be " + what_ +
                 ". Look for an error there. If it is only slow, set JAX_RING_TIMEOUT_S to more seconds";
    changed_.notify_all();
  }
  const std::string error = here.error;
  drop_old_runs();
  throw std::runtime_error(error);
}

void FirstRun::fail(int64_t run, int rank, const std::string& why) {
  if (is_done()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Run& here = runs_[run];
    if (here.error.empty()) here.error = ranks_.at(rank) + " failed: " + why;
    drop_old_runs();
  }
  changed_.notify_all();
}

void FirstRun::drop_old_runs() {
  for (auto each = runs_.begin(); runs_.size() > kMaxRuns && each != runs_.end();) {
    each = each->second.num_waiting == 0 ? runs_.erase(each) : std::next(each);
  }
}

std::string FirstRun::missing(const Run& run) const {
  std::string names;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (run.arrived.count(static_cast<int>(rank)) == 0) names += (names.empty() ? "" : ", ") + ranks_[rank];
  }
  return names;
}

}  // namespace jax_ring::gpu
