// launch_ids.h: gives the executions of a call the same numbers in all processes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace jax_ring::shm {

// Identifies an execution among all executions of equal calls, by the same numbers in all processes.
struct ExecutionNumber {
  int64_t index = 0;     // how many executions came before this one
  uint32_t skipped = 0;  // how many launches before it ended before they reached the call
  bool operator==(const ExecutionNumber& other) const { return index == other.index && skipped == other.skipped; }
};

// Numbers the executions of equal calls in programs of the same name. Those of different groups have their own, since a
// process need not be in all of them.
//
// The runtime numbers an executable's launches from a hash of it, which may differ between processes: one different
// line number is enough. One process alone may also compile a program again, under the same hash or another. The order
// of executions is the same in all processes, because programs of several devices run one after the other, in launch
// order. Skipped launches count too, so that later executions are not mistaken for earlier ones.
class RunCounter {
 public:
  // previous: the last execution of the same executable, if any.
  ExecutionNumber number_of(int64_t run_id, std::optional<int64_t> previous) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t launches = previous ? launches_from(*previous, run_id) : kMaxLaunches;
    for (const auto& [id, number] : recent_) {
      if (id == run_id) return number;
      launches = std::min(launches, launches_from(id, run_id));
    }
    if (previous || launches < kMaxLaunches) next_.skipped += launches - 1;
    recent_.emplace_back(run_id, next_);
    if (recent_.size() > kMaxRecent) recent_.pop_front();
    ++next_.index;
    return recent_.back().second;
  }

 private:
  static constexpr size_t kMaxRecent = 64;        // far more than run at once
  static constexpr uint32_t kMaxLaunches = 1024;  // of the same hash; other hashes are further away

  static uint32_t launches_from(int64_t earlier, int64_t later) {
    return static_cast<uint32_t>(later) - static_cast<uint32_t>(earlier);  // the runtime's numbers wrap around
  }

  std::mutex mutex_;
  ExecutionNumber next_;
  std::deque<std::pair<int64_t, ExecutionNumber>> recent_;
};

// The executions of one call of one executable.
class LaunchIds {
 public:
  explicit LaunchIds(std::shared_ptr<RunCounter> runs) : runs_(std::move(runs)) {}

  ExecutionNumber get(int64_t run_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    // A loop repeats the call in one execution.
    if (previous_ != run_id) number_ = runs_->number_of(run_id, std::exchange(previous_, run_id));
    return number_;
  }

 private:
  const std::shared_ptr<RunCounter> runs_;
  std::mutex mutex_;
  std::optional<int64_t> previous_;
  ExecutionNumber number_;
};

}  // namespace jax_ring::shm
