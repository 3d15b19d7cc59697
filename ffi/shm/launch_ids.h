// launch_ids.h: numbers the executions of a call alike in all processes.
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

// The runtime numbers the launches of an executable from a hash of it on, which is another one where processes differ
// in as little as a line number. What is alike is how many launches there have been: programs of several devices run
// one after the other, in the order of their launches.
class RunCounter {
 public:
  // How many other executions had been seen when this one was seen first. Equal calls in programs of the same name
  // count together, but not those of different groups, which not all processes have to be in.
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
  static constexpr size_t kMaxRecent = 64;  // far more than are under way at a time
  std::mutex mutex_;
  int64_t next_ = 0;
  std::deque<std::pair<int64_t, int64_t>> recent_;
};

// The executions of one call of one executable.
class LaunchIds {
 public:
  explicit LaunchIds(std::shared_ptr<RunCounter> runs) : runs_(std::move(runs)) {}

  // What is alike in all processes for the execution, and for no other one of a call of this identity. The second
  // number counts the launches since the first execution: should one have ended in this process before it came to the
  // call, its further executions are not taken for those before them.
  std::pair<int64_t, uint32_t> get(int64_t run_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!first_) first_ = run_id;
    return {runs_->index_of(run_id), static_cast<uint32_t>(run_id) - static_cast<uint32_t>(*first_)};
  }

 private:
  const std::shared_ptr<RunCounter> runs_;
  std::mutex mutex_;
  std::optional<int64_t> first_;
};

}  // namespace jax_ring::shm
