// engine_test.cc: an all-reduce from arrival to result, on thread pools, for every dtype and number of ranks.
#include "cpu/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/rendezvous/rendezvous.h"
#include "tests/support/support.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_ring::cpu::testing {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

// A thread pool like the runtime's. The destructor finishes what was scheduled, and joins.
class Pool final : public Workers {
 public:
  // on_start runs first on every thread, to put it in a state that the engine must handle.
  explicit Pool(int num_threads, std::function<void()> on_start = [] {}) {
    for (int i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this, on_start] {
        on_start();
        work();
      });
    }
  }

  ~Pool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_threads() const override { return static_cast<int>(threads_.size()); }

  void schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// Workers that run nothing by themselves: the test runs the scheduled tasks, or drops them.
class DeferredWorkers final : public Workers {
 public:
  explicit DeferredWorkers(int num_threads) : num_threads_(num_threads) {}
  int num_threads() const override { return num_threads_; }
  void schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }
  std::vector<std::function<void()>> tasks;

 private:
  int num_threads_;
};

// The operands of all ranks and the expected results.
struct Problem {
  Problem(DType dtype, std::vector<size_t> counts, int num_ranks, unsigned seed = 0, Order order = Order::rank)
      : dtype(dtype), counts(std::move(counts)), num_ranks(num_ranks), order(order) {
    for (size_t operand = 0; operand < this->counts.size(); ++operand) {
      operands.push_back(random_elements(dtype, num_ranks, this->counts[operand],
                                         seed + static_cast<unsigned>(operand * 100 + num_ranks)));
    }
    finish();
  }

  // One value per rank, in every element.
  Problem(DType dtype, size_t count, const std::vector<uint64_t>& by_rank)
      : dtype(dtype), counts{count}, num_ranks(static_cast<int>(by_rank.size())) {
    operands.emplace_back(num_ranks, Bytes(count * element_size(dtype)));
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (size_t i = 0; i < count; ++i) set_element(dtype, operands[0][rank].data(), i, by_rank[rank]);
    }
    finish();
  }

  Message message() const { return {dtype, counts, {Collective::all_reduce, order}}; }

  DType dtype;
  std::vector<size_t> counts;
  int num_ranks;
  Order order = Order::rank;
  std::vector<std::vector<Bytes>> operands;  // by operand, then rank
  std::vector<Bytes> results;                // by operand

 private:
  // In the order of a ring of ranks: element by element, starting at the rank after the owner of the element's block.
  Bytes ring_fold(const std::vector<const void*>& inputs, size_t count) const {
    const size_t pack = 16 / element_size(dtype);
    const size_t packs_per_block = ((count + pack - 1) / pack + num_ranks - 1) / num_ranks;
    Bytes result(count * element_size(dtype));
    for (size_t i = 0; i < count; ++i) {
      const size_t owner = i / pack / packs_per_block;
      std::vector<uint64_t> values;
      for (int step = 1; step <= num_ranks; ++step) {
        values.push_back(element_bits(dtype, inputs[(owner + step) % num_ranks], i));
      }
      set_element(dtype, result.data(), i, scalar_fold(dtype, values));
    }
    return result;
  }

  void finish() {
    for (size_t operand = 0; operand < counts.size(); ++operand) {
      std::vector<const void*> inputs;
      for (const Bytes& of_rank : operands[operand]) inputs.push_back(of_rank.data());
      results.push_back(order == Order::rank ? scalar_fold(dtype, inputs, counts[operand])
                                             : ring_fold(inputs, counts[operand]));
    }
  }
};

// One call on a problem: fresh buffers, and the outcome of each rank.
class Call {
 public:
  // in_place: results overwrite the operands. offset: the buffers' offset in elements from an aligned address.
  Call(const Problem& problem, bool in_place, size_t offset = 0) : problem_(problem), outcomes_(problem.num_ranks) {
    offset *= element_size(problem.dtype);
    for (const auto& operand : problem.operands) {
      inputs_.emplace_back();
      outputs_.emplace_back();
      for (const Bytes& of_rank : operand) {
        inputs_.back().emplace_back(of_rank, offset);
        outputs_.back().emplace_back(in_place ? Bytes() : Bytes(of_rank.size(), 0xa5), offset);
      }
    }
    in_place_ = in_place;
  }

  Participant participant(int rank) {
    Participant result;
    for (size_t operand = 0; operand < inputs_.size(); ++operand) {
      result.inputs.push_back(inputs_[operand][rank].data());
      result.outputs.push_back(this->result(operand, rank).data());
    }
    result.done = outcomes_[rank].completion();
    return result;
  }

  RendezvousPtr rendezvous() {
    RendezvousPtr rendezvous(new Rendezvous);
    rendezvous->num_arrived = problem_.num_ranks;
    for (size_t operand = 0; operand < inputs_.size(); ++operand) {
      const int num_ranks = problem_.num_ranks;
      for (int i = 0; i < 2 * num_ranks; ++i) rendezvous->inputs.push_back(inputs_[operand][i % num_ranks].data());
      for (int rank = 0; rank < num_ranks; ++rank) rendezvous->outputs.push_back(result(operand, rank).data());
    }
    for (const Outcome& outcome : outcomes_) rendezvous->done.emplace_back(outcome.completion());
    return rendezvous;
  }

  bool wait() const {
    for (const Outcome& rank : outcomes_) {
      if (!rank.wait()) return false;
    }
    return true;
  }

  // Waits for all ranks, and checks their results.
  void expect_right() {
    ASSERT_TRUE(wait());
    for (int rank = 0; rank < problem_.num_ranks; ++rank) {
      EXPECT_EQ(outcomes_[rank].times(), 1) << "rank " << rank;
      EXPECT_EQ(outcomes_[rank].error(), "") << "rank " << rank;
      for (size_t operand = 0; operand < inputs_.size(); ++operand) {
        const Bytes& want = problem_.results[operand];
        OffsetBuffer& got = result(operand, rank);
        const auto difference = first_difference(problem_.dtype, got.data(), want.data(), problem_.counts[operand]);
        EXPECT_FALSE(difference) << "rank " << rank << ", operand " << operand << ", element " << *difference;
        // All ranks get the same bits, even in NaNs.
        EXPECT_TRUE(got == result(operand, 0)) << "rank " << rank << ", operand " << operand;
        if (!in_place_) {
          OffsetBuffer before(problem_.operands[operand][rank], 0);
          EXPECT_TRUE(inputs_[operand][rank] == before) << "rank " << rank << "'s operand";
        }
      }
    }
  }

 private:
  OffsetBuffer& result(size_t operand, int rank) { return (in_place_ ? inputs_ : outputs_)[operand][rank]; }

  const Problem& problem_;
  std::vector<std::vector<OffsetBuffer>> inputs_, outputs_;
  std::vector<Outcome> outcomes_;
  bool in_place_;
};

// Runs a call on `num_threads` threads plus the caller, and checks it once all have finished.
void expect_all_reduce(const Problem& problem, int num_threads, bool in_place, size_t offset = 0) {
  Call call(problem, in_place, offset);
  {
    Pool pool(num_threads);
    run_collective(call.rendezvous(), problem.message(), pool);
    ASSERT_TRUE(call.wait());
  }
  call.expect_right();
}

// Elements per operand for which `num_ranks` ranks read and write `bytes` in total.
size_t count_for(DType dtype, int num_ranks, size_t bytes) { return bytes / (2 * num_ranks * element_size(dtype)) + 1; }

// More than the engine handles on one thread (kParallelBytes).
constexpr size_t kLargeBytes = 2400 << 10;

class AllReduceTest : public ::testing::TestWithParam<DType> {};

TEST_P(AllReduceTest, SmallMessages) {
  for (int num_ranks : kRanks) {
    for (const std::vector<size_t>& counts :
         {std::vector<size_t>{1}, {0}, {0, 0}, {1025}, {3, 0, 1, 1024, 0, 77}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}}) {
      SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, counts " << ::testing::PrintToString(counts));
      const Problem problem(GetParam(), counts, num_ranks);
      for (bool in_place : {false, true}) ASSERT_NO_FATAL_FAILURE(expect_all_reduce(problem, 2, in_place));
    }
  }
}

TEST_P(AllReduceTest, LargeMessages) {
  for (int num_ranks : kRanks) {
    const size_t count = count_for(GetParam(), num_ranks, kLargeBytes);
    const Problem problem(GetParam(), {count / 2, 0, 1, count / 2, 100}, num_ranks);
    for (int num_threads : {1, 2, 4}) {
      SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, " << num_threads << " threads");
      ASSERT_NO_FATAL_FAILURE(expect_all_reduce(problem, num_threads, num_threads == 2));
    }
  }
}

TEST_P(AllReduceTest, RingOrder) {
  const size_t pack = 16 / element_size(GetParam());
  for (int num_ranks : kRanks) {
    const size_t round = num_ranks * pack;
    const std::vector<size_t> small{0,     1,         pack - 1,         pack, pack + 1, round - 1,
                                    round, round + 1, 2 * round - pack, 1025};
    const std::vector<size_t> large{count_for(GetParam(), num_ranks, kLargeBytes), 3};
    for (const auto& counts : {small, large}) {
      SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, counts " << ::testing::PrintToString(counts));
      const Problem problem(GetParam(), counts, num_ranks, 0, Order::ring);
      for (bool in_place : {false, true}) ASSERT_NO_FATAL_FAILURE(expect_all_reduce(problem, 2, in_place));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, AllReduceTest, ::testing::ValuesIn(all_dtypes()), dtype_name);

TEST(AllReduce, NoOperands) {
  const Problem problem(DType::f32, {}, 3);
  ASSERT_NO_FATAL_FAILURE(expect_all_reduce(problem, 2, false));
}

// Results larger than the caches. Streaming stores are allowed only for aligned ones.
TEST(AllReduce, ResultsLargerThanTheCaches) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (Order order : {Order::rank, Order::ring}) {
      const Problem problem(dtype, {count_for(dtype, 4, 9 << 20), 77}, 4, 0, order);
      for (bool in_place : {false, true}) {
        for (size_t offset : {0, 1}) ASSERT_NO_FATAL_FAILURE(expect_all_reduce(problem, 2, in_place, offset));
      }
    }
  }
}

// Ranks as threads, one pool for all, several executions at once, many calls: as in a running program.
TEST(AllReduce, ManyConcurrentRendezvous) {
  constexpr int kRuns = 3, kSize = 3;
  const int calls = 200 / kSlowdown;
  const Problem problems[] = {Problem(DType::f32, {5, 0, 300}, kSize),
                              Problem(DType::bf16, {count_for(DType::bf16, kSize, kLargeBytes)}, kSize),
                              Problem(DType::u64, {1}, kSize),
                              Problem(DType::f64, {count_for(DType::f64, kSize, 2 * kLargeBytes), 3}, kSize)};
  RendezvousMap rendezvous_map(ReplicaGroups({2, 0, 1}, {kSize}), "test");
  std::vector<std::vector<std::unique_ptr<Call>>> done(kRuns);
  for (auto& of_run : done) {
    for (int i = 0; i < calls; ++i) of_run.push_back(std::make_unique<Call>(problems[i % 4], i % 3 == 0));
  }
  std::atomic<int> hangs{0};
  {
    Pool pool(2);
    std::vector<std::thread> ranks;
    for (int run = 0; run < kRuns; ++run) {
      const int64_t run_id = next_run_id();
      for (int rank = 0; rank < kSize; ++rank) {
        ranks.emplace_back([&, run, run_id, rank] {
          for (int i = 0; i < calls; ++i) {
            Call& call = *done[run][i];
            const int64_t partition = (rank + 2) % kSize;  // the group's members are 2, 0, 1
            if (auto rendezvous = rendezvous_map.arrive(run_id, partition, call.participant(rank))) {
              run_collective(std::move(rendezvous), problems[i % 4].message(), pool);
            }
            if (!call.wait()) {
              ++hangs;
              return;
            }
          }
        });
      }
    }
    for (std::thread& rank : ranks) rank.join();
  }
  ASSERT_EQ(hangs, 0);
  for (auto& of_run : done) {
    for (auto& call : of_run) call->expect_right();
  }
}

TEST(AllReduce, SmallMessagesWakeNoThread) {
  const Problem problem(DType::f32, {1000}, 4);
  Call call(problem, false);
  DeferredWorkers workers(8);
  run_collective(call.rendezvous(), problem.message(), workers);
  EXPECT_TRUE(workers.tasks.empty());
  call.expect_right();
}

// The caller does the workers' remaining work, so that a busy pool delays nothing. Late workers find nothing to do and
// touch nothing: the buffers no longer exist.
TEST(AllReduce, DoesNotDependOnItsWorkers) {
  const Problem problem(DType::f32, {count_for(DType::f32, 4, 4 * kLargeBytes)}, 4);
  DeferredWorkers workers(4);
  {
    Call call(problem, false);
    run_collective(call.rendezvous(), problem.message(), workers);
    EXPECT_EQ(workers.tasks.size(), 3u);  // the caller is the fourth
    call.expect_right();
  }
  for (auto& task : workers.tasks) task();
  workers.tasks.clear();
}

TEST(AllReduce, WakesNoMoreThreadsThanThereAreChunks) {
  // 16 ranks: large in total, though each operand is just over one chunk of 128 KiB.
  const Problem problem(DType::f32, {32769}, 16);
  Call call(problem, false);
  DeferredWorkers workers(8);
  run_collective(call.rendezvous(), problem.message(), workers);
  EXPECT_EQ(workers.tasks.size(), 1u);
  call.expect_right();
}

// Each rank frees its buffers as soon as it completes, as the runtime may.
TEST(AllReduce, TouchesNoBufferAfterCompletion) {
  constexpr int kSize = 4;
  const size_t count = count_for(DType::f32, kSize, 2 * kLargeBytes);
  for (int round = 0; round < 200 / kSlowdown; ++round) {
    Pool pool(3);
    Outcome outcomes[kSize];
    RendezvousPtr rendezvous(new Rendezvous);
    rendezvous->num_arrived = kSize;
    rendezvous->inputs.resize(2 * kSize);
    for (int rank = 0; rank < kSize; ++rank) {
      auto input = std::make_shared<std::vector<float>>(count, 1.0f);
      auto output = std::make_shared<std::vector<float>>(count);
      rendezvous->inputs[rank] = rendezvous->inputs[rank + kSize] = input->data();
      rendezvous->outputs.push_back(output->data());
      const auto free_then_complete = [input, output,
                                       complete = outcomes[rank].completion()](const CallFailure* error) mutable {
        input.reset();
        output.reset();
        complete(error);
      };
      rendezvous->done.emplace_back(std::function<void(const CallFailure*)>(free_then_complete));
    }
    run_collective(std::move(rendezvous), {DType::f32, {count}}, pool);
    for (const Outcome& one : outcomes) ASSERT_TRUE(one.wait());
  }
}

#if defined(__x86_64__)

constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero
constexpr unsigned kRoundUp = 0x4000;
constexpr unsigned kControl = 0xffc0;  // everything but the sticky exception flags

// Sets another floating-point mode on the calling thread for a scope.
class FloatMode {
 public:
  explicit FloatMode(unsigned bits) : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | bits); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

TEST(AllReduce, ResultDoesNotDependOnTheThreadsFloatMode) {
  for (DType dtype : all_dtypes()) {
    for (size_t bytes : {size_t{1000}, kLargeBytes}) {
      // Threads that share a fold are the same for all types.
      if (kSlowdown > 1 && bytes == kLargeBytes && dtype != DType::f32 && dtype != DType::bf16) continue;
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << ", " << bytes << " bytes");
      // Random numbers test rounding; then subnormals only: 1 + 2 times the smallest.
      const Problem random(dtype, {count_for(dtype, 3, bytes)}, 3);
      const Problem subnormal(dtype, count_for(dtype, 2, bytes), std::vector<uint64_t>{1, 2});
      ASSERT_EQ(element_bits(dtype, subnormal.results[0].data(), 0), 3u);
      for (unsigned mode : {kFlush, kRoundUp, kFlush | kRoundUp}) {
        for (const Problem* problem : {&random, &subnormal}) {
          Call call(*problem, false);
          {
            Pool pool(2, [mode] { _mm_setcsr(_mm_getcsr() | mode); });
            const FloatMode of_caller(mode);
            const unsigned before = _mm_getcsr() & kControl;
            run_collective(call.rendezvous(), problem->message(), pool);
            EXPECT_EQ(_mm_getcsr() & kControl, before) << "the caller's mode was not restored";
            ASSERT_TRUE(call.wait());
          }
          call.expect_right();
        }
      }
    }
  }
}

// A worker gets its own mode back, and completions run in that mode.
TEST(AllReduceDeathTest, RestoresTheWorkersFloatMode) {
  const auto check_all = [] {
    const Problem problem(DType::f32, {count_for(DType::f32, 2, 4 * kLargeBytes)}, 2);
    Call call(problem, false);
    std::atomic<int> changed{0}, num_checked{0};
    {
      Pool pool(3, [] { _mm_setcsr(_mm_getcsr() | kFlush); });
      const auto check_mode = [&](unsigned want) {
        ++num_checked;
        changed += (_mm_getcsr() & kFlush) != want;
      };
      auto rendezvous = call.rendezvous();
      for (Completion& done : rendezvous->done) {
        done = [check_mode, complete = std::make_shared<Completion>(std::move(done))](const CallFailure* error) {
          check_mode(kFlush);
          (*complete)(error);
        };
      }
      const FloatMode of_caller(kFlush);
      run_collective(std::move(rendezvous), problem.message(), pool);
      ASSERT_TRUE(call.wait());
      for (int i = 0; i < 12; ++i) pool.schedule([check_mode] { check_mode(kFlush); });
    }
    EXPECT_EQ(num_checked, 14);
    EXPECT_EQ(changed, 0);
    call.expect_right();
  };
  // In a fresh process, whose completion threads start with this call: a thread inherits the mode of its starter.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((check_all(), _exit(HasFailure())), ::testing::ExitedWithCode(0), "");
}

#endif  // __x86_64__

}  // namespace
}  // namespace jax_ring::cpu::testing
