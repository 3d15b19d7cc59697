// first_run.cc: a rendezvous of the ranks of one process.
#include "cuda/launch/first_run.h"

#include <iterator>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "cuda/groups/deadline.h"

namespace jax_ring::gpu {
namespace {

constexpr size_t kMaxFailedRuns = 16;

}  // namespace

FirstRun::FirstRun(std::string what, std::vector<std::string> ranks)
    : what_(std::move(what)), ranks_(std::move(ranks)), done_(ranks_.size() <= 1) {}

// Whether a rank of this run need not wait any longer, or at all.
bool FirstRun::is_over(int64_t run) const { return is_done() || completed_.count(run) > 0; }

// Null if the run is not one of the first.
FirstRun::Run* FirstRun::find_or_open(int64_t run) {
  if (const auto found = open_.find(run); found != open_.end()) return &found->second;
  size_t num_runs = completed_.size();
  for (const auto& [id, each] : open_) num_runs += each.error.empty();
  return num_runs < kFirstRuns ? &open_[run] : nullptr;
}

// Returns true if the rank was the last.
bool FirstRun::add(int64_t run, Run& here, int rank) {
  here.arrived.insert(rank);
  if (!here.error.empty() || here.arrived.size() < ranks_.size()) return false;
  completed_.insert(run);
  if (completed_.size() >= kFirstRuns) done_.store(true, std::memory_order_release);
  // `completed_` releases these waiting ranks; they do not look here again.
  open_.erase(run);
  changed_.notify_all();
  return true;
}

void FirstRun::arrive(int64_t run, int rank) {
  if (is_done()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_over(run)) return;
  if (Run* const here = find_or_open(run)) add(run, *here, rank);
}

void FirstRun::arrive_and_wait(int64_t run, int rank, double deadline_seconds) {
  if (is_done()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_over(run)) return;
  Run* const here = find_or_open(run);
  if (here == nullptr || add(run, *here, rank)) return;
  ++here->num_waiting;
  const bool in_time =
      changed_.wait_for(lock, duration_of(deadline_seconds), [&] { return is_over(run) || !here->error.empty(); });
  if (is_over(run)) return;
  --here->num_waiting;
  if (!in_time) {
    std::ostringstream error;
    error << "waited " << deadline_seconds << " s in the first run for " << missing(*here) << " to be " << what_
          << ". Look for an error there. If it is only slow, set JAX_RING_TIMEOUT_S to more seconds";
    here->error = error.str();
    changed_.notify_all();
  }
  const std::string error = here->error;
  drop_failed_runs();
  throw std::runtime_error(error);
}

void FirstRun::fail(int64_t run, int rank, const std::string& why) {
  if (is_done()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_over(run)) return;
  Run* const here = find_or_open(run);
  if (here == nullptr || !here->error.empty()) return;
  here->error = ranks_.at(rank) + " failed: " + why;
  changed_.notify_all();
  drop_failed_runs();
}

void FirstRun::drop_failed_runs() {
  for (auto each = open_.begin(); open_.size() > kMaxFailedRuns && each != open_.end();) {
    const bool unused = !each->second.error.empty() && each->second.num_waiting == 0;
    each = unused ? open_.erase(each) : std::next(each);
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
