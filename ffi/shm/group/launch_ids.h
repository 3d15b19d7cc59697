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

// The runtime numbers an executable's launches from a hash of it, which may differ between processes: one different
// line number is enough. The number of launches is the same in all processes, because programs of several devices run
// one after the other, in launch order.
class RunCounter {
 public:
  // How many other executions came before this one. Equal calls in programs of the same name share a counter. Different
  // groups do not, since a process need not be in all of them.
  int64_t index_of(int64_t run_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(recent_.rbegin(), recent_.rend(), [&](const auto& run) { return run.first == run_id; });
    if (found != recent_.rend()) return found->second;
    recent_.emplace_back(run_id, next_);
    if (recent_.size() > kMaxRecent) recent_.pop_front();
    return next_++;
  }

 private:
  static constexpr size_t kMaxRecent = 64;  // far more than run at once
  std::mutex mutex_;
  int64_t next_ = 0;
  std::deque<std::pair<int64_t, int64_t>> recent_;
};

// The executions of one call of one executable.
class LaunchIds {
 public:
  explicit LaunchIds(std::shared_ptr<RunCounter> runs) : runs_(std::move(runs)) {}

  // Identifies an execution among all executions of calls with this identity, by the same numbers in all processes. The
  // second number counts launches since the first execution: if a launch ended in this process before it reached the
  // call, later executions are not mistaken for earlier ones.
  std::pair<int64_t, uint32_t> get(int64_t run_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!first_) first_ = run_id;
    // A loop repeats the call in one execution.
    if (!last_ || last_->first != run_id) last_ = {run_id, runs_->index_of(run_id)};
    return {last_->second, static_cast<uint32_t>(run_id) - static_cast<uint32_t>(*first_)};
  }

 private:
  const std::shared_ptr<RunCounter> runs_;
  std::mutex mutex_;
  std::optional<int64_t> first_;
  std::optional<std::pair<int64_t, int64_t>> last_;  // execution and index
};

}  // namespace jax_ring::shm
