// cpu_model.cc: the rendezvous of a process's ranks and the relay of their completions, on the model's threads.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective/watch.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "cpu/rendezvous/watchdog.h"
#include "model/checker/atomic.h"
#include "model/scenarios.h"

namespace jax_ring::cpu {
namespace {

using model::NamedScenario;
using model::Options;

// Whether a failure has been recorded in the current execution.
model::Atomic<uint32_t>* recorded = nullptr;

// As in xla_cpu/handler.cc: for a thread's calls, and whether it belongs to the pool.
model::PerThread<WaitingRankPtr> kept_waiting;
model::PerThread<bool> is_of_pool;

}  // namespace

// Replaces cpu/rendezvous/watchdog.cc: a thread of the model records the failure.
Watchdog& Watchdog::instance() {
  return immortal([] { return new Watchdog; });
}
void Watchdog::watch(RendezvousMap*) {}
void Watchdog::unwatch(RendezvousMap*) {}
CallFailurePtr Watchdog::failure(int64_t) const {
  if (recorded == nullptr || recorded->load(std::memory_order_acquire) == 0) return nullptr;
  return std::make_shared<const CallFailure>();
}
CallFailurePtr Watchdog::failure(int64_t run_id, RendezvousMap*) { return failure(run_id); }

namespace {

constexpr int64_t kRun = 1;
constexpr std::chrono::milliseconds kPause(25);

// Threads of the runtime, for ranks that move. A busy one runs nothing before the program has ended: no call may depend
// on it.
enum class Pool { none, free, busy };

// The actions of a program's ranks.
struct Program {
  int num_ranks = 2;
  int num_calls = 2;
  bool blocks = false;     // completions of the last call wait for each other, like those of XLA's collectives
  bool fails = false;      // a watchdog fails the run at any time
  bool pauses = false;     // before the last call, so that the watcher of slow completions sleeps
  int early_timeouts = 0;  // of the watcher of slow completions
  bool waits = false;      // ranks wait in their calls
  Pool pool = Pool::none;  // where they wait, if there is a pool
  bool shares = true;      // waiting ranks take shares of the work
};

Program on_pool(Program program, Pool pool = Pool::free) {
  program.waits = true;
  program.pool = pool;
  return program;
}

// Makes state spaces small enough for an exhaustive search.
Program without_shares(Program program) {
  program.shares = false;
  return program;
}

// A process, its ranks, and the outcome of their calls.
class Process {
 public:
  explicit Process(const Program& program)
      : program_(program), map_(groups(program.num_ranks), "call"), ranks_(program.num_ranks) {
    recorded = &failed_;
    for (Rank& rank : ranks_) rank.results.resize(program.num_calls);
    for (int i = 0; i < program.num_ranks; ++i)
      model::name_memory(&ranks_[i], sizeof(Rank), "rank " + std::to_string(i));
    model::allow_early_timeouts(program.early_timeouts);
  }
  ~Process() { recorded = nullptr; }

  void spawn() {
    for (int rank = 0; rank < program_.num_ranks; ++rank) {
      model::spawn("rank " + std::to_string(rank), [this, rank] {
        call(rank, 0);
        model::block("waits for the end of its program", [&] { return ranks_[rank].has_ended; });
      });
    }
    if (program_.fails) model::spawn("watchdog", [this] { fail_all(); });
  }

  void expect_completions() const {
    for (const Rank& rank : ranks_) {
      for (const Result& result : rank.results) {
        if (result.num_completed == 0 && program_.fails) continue;  // the rank ended before this call
        model::require(result.num_completed == 1,
                       "a call completed " + std::to_string(result.num_completed) + " times");
      }
    }
  }

 private:
  struct Result {
    uint64_t value = 0;
    int num_completed = 0;
  };
  struct Rank {
    uint64_t input = 0, output = 0;
    std::vector<Result> results;
    bool has_ended = false;
  };

  static ReplicaGroups groups(int num_ranks) {
    std::vector<int64_t> partitions;
    for (int i = 0; i < num_ranks; ++i) partitions.push_back(i);
    return ReplicaGroups(partitions, {num_ranks});
  }

  // Makes a call, as the handler does.
  void call(int index, int number) {
    Rank& rank = ranks_[index];
    watch_write(&rank.input, sizeof(rank.input));
    rank.input = (number + 1) * (index + 1);
    Participant participant;
    participant.inputs = {&rank.input};
    participant.outputs = {&rank.output};
    participant.done = [this, index, number](const CallFailure* error) { complete(index, number, error); };
    const WaitingRankPtr waiting = program_.waits ? offer_to_wait(participant) : nullptr;
    if (waiting != nullptr) participant.waiting = &waiting;
    RendezvousPtr rendezvous = map_.arrive(kRun, index, std::move(participant));
    const bool moves = waiting != nullptr && waiting->moves();
    if (moves) wait_on_pool(waiting, index, number);
    if (rendezvous != nullptr) {
      const auto work = kept(std::make_shared<Work>(std::move(rendezvous)));
      for (const WaitingRankPtr& other : work->rendezvous->waiting) {
        if (other != nullptr && program_.shares) other->offer([work] { run(*work); });
      }
      finish(*work, 1);
      run(*work);
    }
    if (waiting != nullptr && !moves && waiting->wait()) complete(index, number, nullptr);
  }

  WaitingRankPtr offer_to_wait(Participant& participant) {
    WaitingRankPtr waiting = kept_waiting;
    if (waiting == nullptr || !waiting->is_free()) waiting = kept(std::make_shared<WaitingRank>());
    waiting->skip();
    kept_waiting = waiting;
    participant.thread = {CompletionThreads::may_wait(), is_of_pool, program_.pool != Pool::none};
    return waiting;
  }

  // Instead of the pool's tasks, which begin at any time: one thread for each.
  void wait_on_pool(WaitingRankPtr waiting, int index, int number) {
    kept_waiting = WaitingRankPtr();
    model::spawn("rank " + std::to_string(index) + " on the pool", [this, waiting, index, number] {
      is_of_pool = true;
      if (program_.pool == Pool::busy) {
        model::block("waits for a thread of the pool", [this] {
          return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.has_ended; });
        });
      }
      if (waiting->wait()) complete(index, number, nullptr);
    });
  }

  // The work of a call: one result per rank, with shares of it offered.
  struct Work {
    explicit Work(RendezvousPtr of_call) : rendezvous(std::move(of_call)), num_ranks(rendezvous->num_ranks()) {}

    RendezvousPtr rendezvous;
    const uint32_t num_ranks;
    model::Atomic<uint32_t> next, done;
  };

  // Like those of SharedWork in cpu/engine.cc.
  static void run(Work& work) {
    const uint32_t num_ranks = work.num_ranks;
    uint32_t done = 0;
    for (uint32_t rank; (rank = work.next.fetch_add(1, std::memory_order_relaxed)) < num_ranks; ++done) {
      uint64_t sum = 0;
      for (uint32_t i = 0; i < num_ranks; ++i) {
        const void* const input = work.rendezvous->inputs[i];
        watch_read(input, sizeof(uint64_t));
        sum += *static_cast<const uint64_t*>(input);
      }
      watch_write(work.rendezvous->outputs[rank], sizeof(uint64_t));
      *static_cast<uint64_t*>(work.rendezvous->outputs[rank]) = sum;
    }
    if (done > 0) finish(work, done);
  }

  static void finish(Work& work, uint32_t done) {
    if (work.done.fetch_add(done, std::memory_order_acq_rel) + done < work.num_ranks + 1) return;
    CompletionThreads::instance().complete(std::move(work.rendezvous));
  }

  // Runs when a call has completed: the rest of the rank's program, up to its next call.
  void complete(int index, int number, const CallFailure* error) {
    Rank& rank = ranks_[index];
    ++rank.results[number].num_completed;
    if (error == nullptr) {
      watch_read(&rank.output, sizeof(rank.output));
      const uint64_t expected = static_cast<uint64_t>(number + 1) * program_.num_ranks * (program_.num_ranks + 1) / 2;
      model::require(rank.output == expected, "wrong result");
    }
    const bool is_last = number + 1 == program_.num_calls;
    if (is_last && program_.blocks) {
      ++num_blocked_;
      model::block("waits in a collective of XLA's", [this] { return num_blocked_ == program_.num_ranks; });
    }
    if (error != nullptr || is_last) {
      rank.has_ended = true;
    } else {
      if (program_.pauses && number + 2 == program_.num_calls) SteadyClock::sleep(kPause);
      call(index, number + 1);
    }
  }

  // Like cpu/rendezvous/watchdog.cc: records the failure, then fails the open rendezvous.
  void fail_all() {
    failed_.store(1, std::memory_order_release);
    for (RendezvousPtr& rendezvous : map_.remove_if([](const Rendezvous&) { return true; })) {
      CompletionThreads::instance().complete(std::move(rendezvous), std::make_shared<const CallFailure>());
    }
  }

  // The model identifies atomics by address, so no address may be reused.
  template <class T>
  std::shared_ptr<T> kept(std::shared_ptr<T> object) {
    kept_.push_back(object);
    return object;
  }

  const Program program_;
  RendezvousMap map_;
  std::vector<Rank> ranks_;
  model::Atomic<uint32_t> failed_;
  int num_blocked_ = 0;
  std::vector<std::shared_ptr<void>> kept_;
};

std::function<void()> completes(const Program& program) {
  return [=] {
    const auto process = std::make_shared<Process>(program);
    process->spawn();
    model::at_end([process] { process->expect_completions(); });
  };
}

// The only rank of its process in a call. Its completion runs `follow`.
template <class Follow>
void complete_lone_rank(Follow follow) {
  RendezvousPtr rendezvous(new Rendezvous);
  rendezvous->done.resize(2);
  rendezvous->done[0] = [follow](const CallFailure*) { follow(); };
  CompletionThreads::instance().complete(std::move(rendezvous));
}

// A lone rank's completion completes another call, then blocks until that call has gone on. By then the watcher of slow
// completions sleeps.
void completes_lone_ranks() {
  const auto num_completed = std::make_shared<int>(0);
  model::spawn("rank", [num_completed] {
    CompletionThreads::instance().start();
    SteadyClock::sleep(kPause);
    complete_lone_rank([num_completed] {
      complete_lone_rank([num_completed] { ++*num_completed; });
      model::block("waits in a collective of XLA's", [num_completed] { return *num_completed == 1; });
      ++*num_completed;
    });
    model::block("waits for the end of its program", [num_completed] { return *num_completed == 2; });
  });
}

std::vector<NamedScenario> scenarios() {
  Options exhaustive, random;
  random.exhaustive = false;
  random.max_executions = 2000;
  Options longer = random;
  longer.max_executions = 20000;
  return {
      {"2 ranks, 3 calls", exhaustive, completes({2, 3})},
      {"2 ranks that wait, a call", exhaustive, completes({2, 1, false, false, false, 0, true})},
      {"2 ranks that wait, 3 calls", random, completes({2, 3, false, false, false, 2, true})},
      {"2 ranks that wait, completions that block", random, completes({2, 2, true, false, false, 2, true})},
      {"2 ranks that wait, a failure", random, completes({2, 2, false, true, false, 0, true})},
      {"3 ranks that wait once, 3 calls", random, completes({3, 3, false, false, false, 2, true})},
      {"2 ranks that move, a call", exhaustive, completes(without_shares(on_pool({2, 1})))},
      {"2 ranks that move, a failure", exhaustive, completes(without_shares(on_pool({2, 1, false, true})))},
      {"2 ranks that move, completions that block", exhaustive,
       completes(without_shares(on_pool({2, 1, true, false, false, 1})))},
      {"a busy pool, a call", exhaustive, completes(without_shares(on_pool({2, 1}, Pool::busy)))},
      {"a busy pool, a failure", exhaustive, completes(without_shares(on_pool({2, 1, false, true}, Pool::busy)))},
      {"a busy pool, completions that block", exhaustive,
       completes(without_shares(on_pool({2, 1, true, false, false, 1}, Pool::busy)))},
      {"a busy pool, 3 calls", random, completes(on_pool({2, 3, false, false, false, 2}, Pool::busy))},
      {"2 ranks that move and share, 3 calls", random, completes(on_pool({2, 3, false, false, false, 2}))},
      {"2 ranks that move and share, a failure", random, completes(on_pool({2, 2, false, true}))},
      {"2 ranks that move and share, then block", random, completes(on_pool({2, 2, true, false, false, 2}))},
      {"3 ranks that move and share, 2 calls", longer, completes(on_pool({3, 2, false, false, false, 2}))},
      {"2 ranks, 2 calls, timeouts", exhaustive, completes({2, 2, false, false, false, 2})},
      {"2 ranks, completions that block", exhaustive, completes({2, 1, true, false, false, 1})},
      {"2 ranks, 2 calls, a failure", exhaustive, completes({2, 2, false, true})},
      {"2 ranks, a pause, completions that block", random, completes({2, 2, true, false, true})},
      {"lone ranks, a pause, a completion that blocks", random, completes_lone_ranks},
      {"3 ranks, a call", exhaustive, completes({3, 1})},
      {"3 ranks, completions that block", exhaustive, completes({3, 1, true})},
      {"3 ranks, 3 calls, completions that block", random, completes({3, 3, true, false, false, 3})},
      {"3 ranks, 3 calls, a failure", random, completes({3, 3, false, true, false, 3})},
  };
}

}  // namespace
}  // namespace jax_ring::cpu

int main(int argc, char** argv) { return jax_ring::model::run_scenarios(jax_ring::cpu::scenarios(), argc, argv); }
