// allocation_test.cc: a repeated small call allocates nothing between arrival and completion, and groups little.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "cpu/engine.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "tests/support/support.h"

namespace {
std::atomic<long> num_allocations{0};
std::atomic<size_t> num_bytes{0};
}  // namespace

// Replaced for the whole test program; the other forms of new call these.
void* operator new(size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  num_bytes.fetch_add(size, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t step = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(step, (size + step - 1) / step * step)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace jax_ring::cpu::testing {
namespace {

class NoWorkers final : public Workers {
 public:
  int num_threads() const override { return 1; }
  void schedule(std::function<void()>) override { FAIL() << "a small message woke a thread"; }
};

// Ranks that make one call after the other, each from the completion of the previous one, as in a compiled loop.
class Loop {
 public:
  explicit Loop(int num_ranks) : ranks_(num_ranks), rendezvous_map_(groups(num_ranks), "test") {
    for (Rank& rank : ranks_) {
      for (size_t count : message_.counts) rank.buffers.emplace_back(count, 1.0f);
    }
  }

  // Whether all ranks complete this many calls.
  bool run(int calls) {
    std::atomic<int> running{static_cast<int>(ranks_.size())};
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank].calls_left = calls;
      call(rank, running);
    }
    const Clock::time_point limit = Clock::now() + kTestTimeout;
    while (running > 0) {
      if (Clock::now() > limit) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  struct Rank {
    int calls_left = 0;
    std::vector<std::vector<float>> buffers;
    Participant participant;  // kept for its memory, as in the handler
  };

  static ReplicaGroups groups(int num_ranks) {
    std::vector<int64_t> partitions;
    for (int rank = 0; rank < num_ranks; ++rank) partitions.push_back(rank);
    return ReplicaGroups(partitions, {num_ranks});
  }

  void call(size_t index, std::atomic<int>& running) {
    Rank& rank = ranks_[index];
    if (rank.calls_left-- == 0) {
      --running;
      return;
    }
    rank.participant.inputs.clear();
    rank.participant.outputs.clear();
    for (std::vector<float>& buffer : rank.buffers) {
      rank.participant.inputs.push_back(buffer.data());
      rank.participant.outputs.push_back(buffer.data());
    }
    rank.participant.done = [this, index, &running](const CallFailure*) { call(index, running); };
    if (RendezvousPtr rendezvous = rendezvous_map_.arrive(run_id_, index, std::move(rank.participant))) {
      run_collective(std::move(rendezvous), message_, workers_);
    }
  }

  const Message message_{DType::f32, {100, 0, 1}, {}, Op::sum};
  const int64_t run_id_ = next_run_id();
  std::vector<Rank> ranks_;
  NoWorkers workers_;
  RendezvousMap rendezvous_map_;
};

// More threads than the calls below can need at once: on a busy machine CompletionThreads may start some at any time.
void start_completion_threads() {
  constexpr int kThreads = 64;
  std::atomic<int> arrived{0}, left{0};
  RendezvousPtr rendezvous(new Rendezvous);
  for (int rank = 0; rank < kThreads; ++rank) {
    rendezvous->done.emplace_back([&](const CallFailure*) {
      ++arrived;
      while (arrived < kThreads) std::this_thread::yield();
      ++left;
    });
  }
  CompletionThreads::instance().complete(std::move(rendezvous));
  while (left < kThreads) std::this_thread::yield();
}

TEST(Allocation, NoneInAWarmLoop) {
  start_completion_threads();
  for (int num_ranks : {1, 2, 8}) {
    Loop loop(num_ranks);
    // A thread preempted during a completion holds its rendezvous back from the next call, which then allocates another
    // one. This adds a few allocations to some rounds on a busy machine; an allocation in every call would add a
    // thousand to all rounds.
    long fewest = std::numeric_limits<long>::max();
    for (int round = 0; round < 20 && fewest > 0; ++round) {
      const long before = num_allocations;
      ASSERT_TRUE(loop.run(1000)) << num_ranks << " ranks";
      fewest = std::min(fewest, num_allocations - before);
    }
    EXPECT_EQ(fewest, 0) << num_ranks << " ranks, 1000 calls";
  }
}

// A program may come from a file, with any numbers in it.
TEST(Allocation, LittleForGroupsOfLargeNumbers) {
  const size_t before = num_bytes;
  const ReplicaGroups groups({0, 1 << 24}, {2});
  EXPECT_LT(num_bytes - before, 4096u);
  EXPECT_EQ(groups.place(1 << 24).rank, 1);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
