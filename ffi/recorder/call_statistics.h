// call_statistics.h: how often a call ran, how long it took, and which of its ranks came last.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace jax_ring {

// Counters of one call instruction, for all its groups. Times are in nanoseconds.
class CallStatistics {
 public:
  struct Late {
    uint64_t count, nanoseconds;
  };
  struct Totals {
    uint64_t count, failures, waited, busy, bytes;
    std::vector<Late> late;  // by member: group after group, in rank order
  };

  explicit CallStatistics(const std::vector<size_t>& group_sizes) {
    size_t next = 0;
    for (size_t size : group_sizes) {
      first_.push_back(next);
      next += size;
    }
    late_ = std::make_unique<LateCounters[]>(next);
    num_members_ = next;
  }

  // waited: from first arrival to last. busy: from there to the end. late: the delay of the last rank after the one
  // before it. bytes: of a rank's operands.
  void add(int group, int last, int64_t waited, int64_t busy, int64_t late, uint64_t bytes) {
    if (waited != 0) waited_.fetch_add(waited, std::memory_order_relaxed);
    busy_.fetch_add(busy, std::memory_order_relaxed);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
    LateCounters& of_rank = late_[first_[group] + last];
    of_rank.count.fetch_add(1, std::memory_order_relaxed);
    of_rank.nanoseconds.fetch_add(late, std::memory_order_relaxed);
  }
  void add_failure() { failures_.fetch_add(1, std::memory_order_relaxed); }

  Totals read(bool reset) {
    const auto take = [reset](std::atomic<uint64_t>& counter) {
      return reset ? counter.exchange(0, std::memory_order_relaxed) : counter.load(std::memory_order_relaxed);
    };
    Totals totals{0, take(failures_), take(waited_), take(busy_), take(bytes_), {}};
    for (size_t i = 0; i < num_members_; ++i) {
      const uint64_t count = take(late_[i].count);
      totals.late.push_back({count, take(late_[i].nanoseconds)});
      totals.count += count;  // every call has one last rank
    }
    return totals;
  }

 private:
  struct LateCounters {
    std::atomic<uint64_t> count{0}, nanoseconds{0};
  };
  alignas(64) std::atomic<uint64_t> failures_{0};
  std::atomic<uint64_t> waited_{0}, busy_{0}, bytes_{0};
  std::vector<size_t> first_;  // by group: the index of its first member
  std::unique_ptr<LateCounters[]> late_;
  size_t num_members_ = 0;
};

}  // namespace jax_ring
