// processes_with_gpus_test.cc: groups with GPUs of several forked processes: CUDA IPC, processes that come late, fail,
// forget their groups, or end.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/standin/program/fixture.h"
#include "tests/standin/program/shared_store.h"

namespace jax_ring::standin {
namespace {

constexpr double kDeadline = 15;
constexpr double kPatience = 15;  // of the store

// A host's GPUs: every process sees all, and owns some. Their ids are unique among processes.
struct Host {
  std::vector<std::vector<int>> ordinals;  // by process

  int num_processes() const { return static_cast<int>(ordinals.size()); }
  // The processes alternate.
  std::vector<gpu::Member> members() const {
    std::vector<gpu::Member> all;
    for (size_t i = 0; i < 8; ++i) {
      for (int process = 0; process < num_processes(); ++process) {
        if (i >= ordinals[process].size()) continue;
        all.push_back({process, id_of_gpu(process, ordinals[process][i])});
      }
    }
    return all;
  }
};

const Host kOneEach{{{0}, {1}, {2}}}, kTwo{{{0}, {1}}}, kUneven{{{1, 3}, {0}}};

// A process of the host. It must have no context on GPUs other than its own.
class Process {
 public:
  Process(const Host& host, int number, SharedStore& shared, double deadline = kDeadline, double patience = kPatience,
          unsigned seed = 0)
      : host_(host), number_(number) {
    Hardware hardware{4};
    hardware.seed = seed;
    gpus_ = start_process(number, hardware, shared.store(patience), deadline);
    Machine::instance().allow_contexts({own().begin(), own().end()});
    Machine::instance().expect_loaded_together(own());
  }
  ~Process() {
    for (const std::string& each : Machine::instance().violations()) {
      ADD_FAILURE() << "process " << number_ << ": " << each;
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  const std::vector<int>& own() const { return host_.ordinals[number_]; }
  Gpus& gpus() { return *gpus_; }

  // The error of each of its GPUs.
  std::vector<std::string> run(Program& program) {
    const std::vector<std::string> all = program.run(own());
    std::vector<std::string> errors;
    for (int gpu : own()) errors.push_back(all[gpu]);
    return errors;
  }
  void run_and_check(Program& program, const std::vector<Call*>& calls) {
    for (Call* call : calls) call->clear_results();
    for (const std::string& error : run(program)) EXPECT_EQ(error, "") << "process " << number_;
    for (Call* call : calls) {
      for (int gpu : own()) call->expect_result(call->place_of(number_, gpus_->id(gpu)));
    }
  }

 private:
  const Host& host_;
  const int number_;
  std::unique_ptr<Gpus> gpus_;
};

void expect_success(const std::vector<int>& statuses) { EXPECT_EQ(statuses, std::vector<int>(statuses.size(), 0)); }

CallSpec spec(const Host& host, const char* algorithm = "two_shot", size_t count = 1000) {
  CallSpec what{host.members(), 1, {}, {count}};
  what.algorithm = algorithm;
  return what;
}

class Hosts : public ::testing::TestWithParam<Host> {};
INSTANTIATE_TEST_SUITE_P(, Hosts, ::testing::Values(kTwo, kOneEach, kUneven));

TEST_P(Hosts, HaveTheValuesOfTheDefinition) {
  SharedStore shared;
  expect_success(run_processes(GetParam().num_processes(), [&](int number) {
    Process process(GetParam(), number, shared);
    std::deque<Call> calls;
    for (const char* algorithm : {"one_shot", "two_shot", "ring"}) calls.emplace_back(spec(GetParam(), algorithm), 1);
    const size_t ranks = GetParam().members().size();
    std::vector<Plan> plans = cpu::testing::exchange_plans(static_cast<int>(ranks));
    for (const Plan& plan : {Plan{Collective::reduce_scatter}, Plan{Collective::all_gather},
                             Plan{Collective::broadcast}, Plan{Collective::all_reduce, Order::ring}}) {
      plans.push_back(plan);
    }
    for (const Plan& plan : plans) {
      CallSpec what{GetParam().members(), 1, plan, {30 * ranks}};
      what.lane = 2;
      calls.emplace_back(what, 2);
    }
    std::vector<Call*> all;
    for (Call& call : calls) all.push_back(&call);
    for (Mode mode : {Mode::stream, Mode::recorded}) {
      Program program(number, process.gpus(), all, mode);
      for (int run = 0; run < 3; ++run) process.run_and_check(program, all);
    }
    engine().reset();
    shared.meet(0, GetParam().num_processes());
  }));
}

TEST(Processes, MeetUnderManySchedules) {
  SharedStore shared;
  expect_success(run_processes(2, [&](int number) {
    for (unsigned seed = 1; seed <= 8; ++seed) {
      Process process(kTwo, number, shared, kDeadline, kPatience, 2 * seed + number);
      // A separate runtime for each seed, with its own keys.
      gpu::KeyValueStore store = shared.store(kPatience), prefixed;
      const std::string prefix = std::to_string(seed) + ":";
      prefixed.publish = [=](const std::string& key, const std::string& value) { store.publish(prefix + key, value); };
      prefixed.fetch = [=](const std::string& key) { return store.fetch(prefix + key); };
      engine().set_process(number, prefixed);
      engine().device_ids().set([=] { return std::map<int, int64_t>{{number, id_of_gpu(number, number)}}; });
      Call call(spec(kTwo, seed % 2 == 0 ? "ring" : "one_shot", 300 * seed), seed);
      Program program(number, process.gpus(), {&call});
      for (int run = 0; run < 2; ++run) process.run_and_check(program, {&call});
    }
    shared.meet(0, 2);
  }));
}

// ---- Connecting fails, and works later

TEST(Processes, AProcessThatIsLateIsNamedAndMetLater) {
  SharedStore shared;
  expect_success(run_processes(2, [&](int number) {
    if (number == 1) shared.meet(0, 2);  // when process 0 has given up
    Process process(kTwo, number, shared, kDeadline, number == 0 ? 0.2 : kPatience);
    Call call(spec(kTwo), 1);
    Program program(number, process.gpus(), {&call});
    if (number == 0) {
      EXPECT_TRUE(says(process.run(program)[0], "process 1"));
      shared.meet(0, 2);
      std::vector<std::string> errors;
      for (int attempt = 0; attempt < 40 && (errors.empty() || !errors[0].empty()); ++attempt) {
        errors = process.run(program);
      }
      EXPECT_EQ(errors[0], "");
      call.expect_result(0);
    } else {
      process.run_and_check(program, {&call});
    }
    process.run_and_check(program, {&call});
    shared.meet(1, 2);
  }));
}

struct Refusal {
  const char* function;
  cudaError_t error;
  const char* text;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.function; }

class Refused : public ::testing::TestWithParam<Refusal> {};
INSTANTIATE_TEST_SUITE_P(
    , Refused,
    ::testing::Values(Refusal{"cudaIpcOpenMemHandle", cudaErrorInvalidResourceHandle, "invalid resource handle"},
                      Refusal{"cudaIpcGetMemHandle", cudaErrorInvalidValue, "cudaErrorInvalidValue"},
                      Refusal{"cudaMalloc", cudaErrorMemoryAllocation, "out of memory"}),
    [](const auto& info) { return std::string(info.param.function); });

// The healthy process learns why, and both succeed when they try again.
TEST_P(Refused, BothHearTheCauseAndTheNextAttemptWorks) {
  SharedStore shared;
  expect_success(run_processes(2, [&](int number) {
    Process process(kTwo, number, shared);
    if (number == 1) Machine::instance().fail(GetParam().function, GetParam().error);
    Call call(spec(kTwo), 1);
    Program program(number, process.gpus(), {&call});
    const std::string error = process.run(program)[0];
    EXPECT_TRUE(says(error, GetParam().text));
    EXPECT_TRUE(says(error, "GPU " + std::to_string(id_of_gpu(1, 1)) + " of process 1"));
    for (int run = 0; run < 2; ++run) process.run_and_check(program, {&call});
    shared.meet(0, 2);
  }));
}

// ---- Groups end

TEST(Processes, GoOnAfterAFailureWhenAllForgetTheirGroups) {
  SharedStore shared;
  expect_success(run_processes(2, [&](int number) {
    Process process(kTwo, number, shared);
    {
      Call call(spec(kTwo), 1);
      Program program(number, process.gpus(), {&call});
      process.run_and_check(program, {&call});
      shared.meet(0, 2);
      if (number == 0) {
        engine().set_deadline(0.2);
        EXPECT_EQ(process.run(program)[0], "");  // alone
        EXPECT_TRUE(says(process.run(program)[0], "waited 0.2 s for rank 1"));
        engine().set_deadline(kDeadline);
      }
      shared.meet(1, 2);
    }
    engine().reset();
    Call call(spec(kTwo), 2);
    Program program(number, process.gpus(), {&call});
    for (int run = 0; run < 2; ++run) process.run_and_check(program, {&call});
    shared.meet(2, 2);
  }));
}

// As when jax.distributed is initialized again: no process may write into the last runtime's memory.
TEST(Processes, AnotherRuntimeHasNewGroups) {
  SharedStore first, second;
  expect_success(run_processes(2, [&](int number) {
    Process process(kTwo, number, first);
    Call call(spec(kTwo), 1);
    Program program(number, process.gpus(), {&call});
    process.run_and_check(program, {&call});
    engine().set_process(number, second.store(kPatience));
    engine().device_ids().set([=] { return std::map<int, int64_t>{{number, id_of_gpu(number, number)}}; });
    Call again(spec(kTwo), 2);
    Program next(number, process.gpus(), {&again});
    process.run_and_check(next, {&again});
    const std::string error = process.run(program)[0];
    EXPECT_TRUE(says(error, "jax.clear_caches()"));
    second.meet(0, 2);
  }));
}

// The last kernel of process 1 is still running, and posts into the memory of process 0, which is done and forgets its
// groups.
TEST(Processes, MemoryOutlivesThePostsOfAnotherProcess) {
  for (const char* algorithm : {"one_shot", "two_shot", "ring"}) {
    SharedStore shared;
    expect_success(run_processes(2, [&](int number) {
      Process process(kTwo, number, shared);
      Call call(spec(kTwo, algorithm), 1);
      Program program(number, process.gpus(), {&call});
      process.run_and_check(program, {&call});
      if (number == 1) {
        // The kernel is done, but its stream is not: everything that the kernel can reach must stay.
        std::promise<void> forgotten;
        std::shared_future<void> wait(forgotten.get_future());
        const Invocation invocation = call.invocation(1, 1, process.gpus().stream(1), 99);
        EXPECT_EQ(call.instruction().initialize(invocation), "");
        set_current_gpu(1);
        EXPECT_EQ(call.instruction().execute(invocation), "");
        std::vector<const void*> held = Memory::instance().addresses(1 << 20);  // mailboxes
        process.gpus().stream(1)->enqueue({[wait] { wait.wait_for(std::chrono::seconds(30)); }, held});
        set_current_gpu(-1);
        shared.meet(0, 2);
        forgotten.set_value();
        EXPECT_TRUE(process.gpus().stream(1)->wait());
      } else {
        process.run_and_check(program, {&call});
        engine().reset();
        shared.meet(0, 2);
      }
      engine().reset();
      shared.meet(1, 2);
    }));
  }
}

}  // namespace
}  // namespace jax_ring::standin
