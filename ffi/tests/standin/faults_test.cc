// faults_test.cc: faults on several GPUs that one GPU never shows: driver locks, contexts, captures, lanes, forgotten
// groups.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/standin/program/fixture.h"

namespace jax_ring::standin {
namespace {

using std::chrono::milliseconds;
using Faults = StandinTest;

constexpr size_t kMailboxBytes = 1 << 20;  // at least; other allocations are smaller

CallSpec spec(std::vector<gpu::Member> members, const char* algorithm = "two_shot", int lane = 0) {
  CallSpec what{std::move(members)};
  what.algorithm = algorithm;
  what.lane = lane;
  return what;
}

// Work of XLA beside the calls that may wait for the driver's lock, such as loading its own kernels.
void allocate_as_xla() {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 100), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

// A task that a test adds to a stream, to hold up later work. It may still write to some memory.
class Gate {
 public:
  void block(cudaStream_t stream, std::vector<const void*> written = {}) {
    stream->enqueue({[opened = opened_] { opened.wait_for(std::chrono::seconds(60)); }, std::move(written)});
  }
  void open() { open_.set_value(); }

 private:
  std::promise<void> open_;
  std::shared_future<void> opened_{open_.get_future()};
};

// ---- A kernel must not wait for a rank that waits for the driver

class DriverLocks : public StandinTest, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(, DriverLocks, ::testing::Values("before_initialize", "before_execute"));

TEST_P(DriverLocks, ALateGpuIsStillInitializing) {
  Hardware hardware{3};
  hardware.driver_waits_for_kernels = true;
  start(hardware, 3);
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call});
  const auto late = [](int gpu) {
    if (gpu == 1) std::this_thread::sleep_for(milliseconds(100));
    allocate_as_xla();
  };
  Hooks hooks;
  (GetParam() == std::string("before_initialize") ? hooks.before_initialize : hooks.before_execute) = late;
  program.run_and_check(hooks);
  program.run_and_check();
}

// The second program has a call in a lane that is not connected yet, while the first one still runs on a GPU.
TEST_F(Faults, ANewLaneConnectsWhileKernelsRun) {
  Hardware hardware{2};
  hardware.driver_waits_for_kernels = true;
  start(hardware, 5);
  Call first(spec(members(), "two_shot", 0), 1), second(spec(members(), "one_shot", 1), 2);
  Program one(0, *gpus_, {&first}), other(0, *gpus_, {&second});
  one.run_and_check();
  other.run_and_check({[](int gpu) {
                         if (gpu == 1) std::this_thread::sleep_for(milliseconds(50));
                       },
                       {}});
  one.run_and_check();
}

// XLA instantiates a graph after the engine has recorded its calls, and launches it without telling the engine. If the
// driver makes the instantiation wait for another GPU's kernel, the deadline must end it: with an error or the right
// sums, never with wrong ones.
TEST_F(Faults, AGraphThatIsInstantiatedLateEndsWithAnError) {
  Hardware hardware{2};
  hardware.driver_waits_for_kernels = true;
  start(hardware, 1);
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call}, Mode::recorded);
  program.run_and_check();
  call.clear_results();
  const Hooks hooks{{}, [](int gpu) { std::this_thread::sleep_for(milliseconds(50 * gpu)); }};
  for (const std::string& error : program.run({}, hooks)) EXPECT_EQ(error, "") << "not yet";
  for (int rank : {0, 1}) {
    if (!call.is_poisoned(rank)) call.expect_result(rank);
  }
  if (!call.is_poisoned(0)) return;
  for (const std::string& error : program.run()) EXPECT_TRUE(says(error, "waited 1 s"));
}

TEST_F(Faults, AGpuThatDoesNotComeIsNamed) {
  start({3}, 0.3);
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call});
  const std::vector<std::string> errors = program.run({0, 2});
  for (int gpu : {0, 2}) {
    EXPECT_TRUE(says(errors[gpu], std::to_string(id_of_gpu(0, 1)))) << gpu;
    EXPECT_TRUE(says(errors[gpu], "train.py:7")) << gpu;
  }
  engine().set_deadline(kDeadline);
  program.run_and_check();
}

// ---- Nothing waits for a connection but the GPUs that need it

TEST_F(Faults, OthersGoOnWhileAGroupConnects) {
  std::promise<void> fetching, give_up;
  std::atomic<bool> asked{false};
  const std::shared_future<void> gave_up = give_up.get_future().share();
  gpu::KeyValueStore store;
  store.publish = [](const std::string&, const std::string&) {};
  store.fetch = [&](const std::string& key) -> std::string {
    if (stage_of_thread != Stage::initialize) ADD_FAILURE() << "asked for " << key << " outside initialize";
    if (!asked.exchange(true)) fetching.set_value();
    gave_up.wait_for(std::chrono::seconds(20));
    throw std::runtime_error("no process published " + key);
  };
  start({3}, kDeadline, store);
  keeps_memory_ = true;
  Machine::instance().expect_loaded_together({1, 2});
  // GPU 0 meets one of an absent process; GPUs 1 and 2 are alone.
  Call abroad(spec({{0, id_of_gpu(0, 0)}, {1, 5}}), 1);
  Call home(spec({{0, id_of_gpu(0, 1)}, {0, id_of_gpu(0, 2)}}), 2);
  Program waits(0, *gpus_, {&abroad});
  std::vector<std::string> errors;
  std::thread thread([&] { errors = waits.run({0}); });
  ASSERT_EQ(fetching.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  auto others = std::async(std::launch::async, [&] {
    engine().set_deadline(kDeadline);
    Program program(0, *gpus_, {&home});
    for (int run = 0; run < 3; ++run) {
      for (const std::string& error : program.run({1, 2})) EXPECT_EQ(error, "");
      home.expect_result(0);
      home.expect_result(1);
    }
  });
  // In vain if a lock is held meanwhile: then they end only after the store has given up.
  EXPECT_EQ(others.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "the other GPUs had to wait";
  give_up.set_value();
  thread.join();
  EXPECT_TRUE(says(errors[0], "no process published"));
}

TEST_F(Faults, ExecuteAsksNobody) {
  start({2});
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call});
  program.warm_up();
  const Machine& machine = Machine::instance();
  const uint64_t allocations = machine.num_calls("cudaMalloc"), loads = machine.num_calls("cudaFuncGetAttributes");
  const uint64_t waits = machine.num_calls("cudaStreamSynchronize");
  for (int run = 0; run < 5; ++run) program.run_and_check();
  EXPECT_EQ(machine.num_calls("cudaMalloc"), allocations);
  EXPECT_EQ(machine.num_calls("cudaFuncGetAttributes"), loads);
  EXPECT_EQ(machine.num_calls("cudaStreamSynchronize"), waits + 5 * 2) << "besides XLA's own";
}

TEST_F(Faults, KernelsForOlderGpusStartAfterTheirStreamsEarlierWork) {
  Hardware hardware{2};
  hardware.ptx_version = 80;
  start(hardware);
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call});
  program.warm_up();
  program.run_and_check();
}

// ---- Compiling

TEST_F(Faults, CompilingAloneTouchesNoGpuAndNoStore) {
  gpu::KeyValueStore store;
  store.publish = [](const std::string& key, const std::string&) { ADD_FAILURE() << "published " << key; };
  store.fetch = [](const std::string& key) -> std::string {
    ADD_FAILURE() << "asked for " << key;
    throw std::runtime_error("nobody is there");
  };
  start({1}, kDeadline, store);
  const uint64_t before = Machine::instance().num_calls();
  Call call(spec({{0, id_of_gpu(0, 0)}, {1, 5}, {2, 6}}), 1), elsewhere(spec({{3, 8}, {4, 9}}), 2);
  const Program program(0, *gpus_, {&call, &elsewhere});
  EXPECT_EQ(Machine::instance().num_calls(), before);
}

// ---- Captures of other threads

class Captures : public StandinTest, public ::testing::WithParamInterface<cudaStreamCaptureMode> {};
INSTANTIATE_TEST_SUITE_P(, Captures, ::testing::Values(cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal));

TEST_P(Captures, SurviveAGroupThatConnects) {
  start({3});
  Machine::instance().expect_loaded_together({0, 1});
  set_current_gpu(2);
  CUstream_st recording(2, cudaStreamNonBlocking);
  ASSERT_EQ(cudaStreamBeginCapture(&recording, GetParam()), cudaSuccess);
  {
    Call call(spec(members(2)), 1);
    Program program(0, *gpus_, {&call});
    for (const std::string& error : program.run({0, 1})) EXPECT_EQ(error, "");
  }
  engine().reset();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(&recording, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  set_current_gpu(-1);
}

TEST_F(Faults, ACaptureThatFailsLeavesTheGroupInOrder) {
  start({2});
  Call call(spec(members()), 1);
  {
    Program program(0, *gpus_, {&call}, Mode::recorded);
    program.run_and_check();
    Machine::instance().fail("cudaStreamEndCapture", cudaErrorStreamCaptureInvalidated, 2);
    for (const std::string& error : program.run()) EXPECT_TRUE(says(error, "cudaErrorStreamCaptureInvalidated"));
    for (int run = 0; run < 3; ++run) program.run_and_check();
  }
}

// ---- Contexts

TEST_F(Faults, NoContextOnTheGpuOfAnotherProcess) {
  start({3});
  Machine::instance().allow_contexts({1, 2});
  Machine::instance().expect_loaded_together({1, 2});
  {
    Call call(spec({{0, id_of_gpu(0, 1)}, {0, id_of_gpu(0, 2)}}), 1);
    Program program(0, *gpus_, {&call});
    for (const std::string& error : program.run({1, 2})) EXPECT_EQ(error, "");
    call.expect_result(0);
  }
  // On a Python thread without a context.
  engine().reset();
  EXPECT_EQ(current_gpu(), -1);
  EXPECT_EQ(Machine::instance().contexts(), (std::set<int>{1, 2}));
}

// ---- Lanes

// Two simultaneous calls on each GPU. The first one of GPU 0 waits for GPU 1, whose stream is held up.
std::vector<std::string> run_two_at_a_time(Gpus& gpus, Call& one, Call& other) {
  Program first(0, gpus, {&one}), second(0, gpus, {&other});
  std::vector<std::unique_ptr<CUstream_st>> more;
  for (int gpu = 0; gpu < 2; ++gpu) more.push_back(std::make_unique<CUstream_st>(gpu, cudaStreamNonBlocking));
  first.warm_up();
  second.warm_up();
  one.clear_results();
  other.clear_results();
  Gate gate;
  gate.block(gpus.stream(1));
  gate.block(more[1].get());
  std::vector<std::string> errors;
  for (int gpu : {0, 1}) {
    set_current_gpu(gpu);
    const int64_t run_id = cpu::testing::next_run_id();
    const auto execute = [&](Call& call, cudaStream_t stream) {
      const int place = call.place_of(0, gpus.id(gpu));
      const Invocation invocation = call.invocation(place, gpu, stream, run_id);
      errors.push_back(call.instruction().initialize(invocation));
      errors.push_back(call.instruction().execute(invocation));
    };
    execute(one, gpus.stream(gpu));
    if (gpu == 0) std::this_thread::sleep_for(milliseconds(50));
    execute(other, more[gpu].get());
    if (gpu == 0) std::this_thread::sleep_for(milliseconds(50));
  }
  gate.open();
  for (int gpu : {0, 1}) {
    set_current_gpu(gpu);
    EXPECT_EQ(cudaStreamSynchronize(gpus.stream(gpu)), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(more[gpu].get()), cudaSuccess);
  }
  set_current_gpu(0);
  errors.push_back(one.instruction().initialize(one.invocation(0, 0, gpus.stream(0), cpu::testing::next_run_id())));
  set_current_gpu(-1);
  return errors;
}

TEST_F(Faults, CallsInDifferentLanesRunAtTheSameTime) {
  start({2});
  Call one(spec(members(), "two_shot", 0), 1), other(spec(members(), "two_shot", 1), 2);
  for (const std::string& error : run_two_at_a_time(*gpus_, one, other)) EXPECT_EQ(error, "");
  for (int rank : {0, 1}) {
    one.expect_result(rank);
    other.expect_result(rank);
  }
}

// Equal calls with equal tags: without the busy flag one would take the other's data for its own.
TEST_F(Faults, TwoCallsInOneLaneFailLoudly) {
  for (const char* algorithm : {"one_shot", "two_shot", "ring"}) {
    start({2}, 1.5);
    {
      Call one(spec(members(), algorithm), 1), other(spec(members(), algorithm), 2);
      const std::vector<std::string> errors = run_two_at_a_time(*gpus_, one, other);
      EXPECT_TRUE(says(errors.back(), "lane")) << algorithm;
      EXPECT_TRUE(one.is_poisoned(0)) << algorithm;
      EXPECT_TRUE(other.is_poisoned(0)) << algorithm;
    }
    TearDown();
  }
}

// ---- Groups that are forgotten

TEST_F(Faults, AnotherRuntimeForgetsTheGroupsOfTheLast) {
  start({2});
  {
    Call call(spec(members()), 1);
    Program program(0, *gpus_, {&call});
    program.run_and_check();
  }
  EXPECT_GT(Memory::instance().count(), 0u);
  engine().set_process(0, {});
  engine().device_ids().set([] { return std::map<int, int64_t>{{0, id_of_gpu(0, 0)}, {1, id_of_gpu(0, 1)}}; });
  EXPECT_TRUE(releases_memory(allocations_before_)) << "kernels would go on writing into mailboxes of the last runtime";
  Call call(spec(members()), 2);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
}

TEST_F(Faults, AProgramOfAForgottenGroupSaysSo) {
  start({2});
  Call call(spec(members()), 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
  engine().reset();
  for (const std::string& error : program.run()) EXPECT_TRUE(says(error, "jax.clear_caches()"));
}

// A kernel's last posts may arrive after the receiving GPU is done.
TEST_F(Faults, MemoryOutlivesThePostsToIt) {
  start({2});
  {
    Call call(spec(members()), 1);
    Program program(0, *gpus_, {&call});
    program.warm_up();
  }
  Gate gate;
  gate.block(gpus_->stream(1), Memory::instance().addresses(kMailboxBytes));
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(100));
    gate.open();
  });
  engine().reset();
  opener.join();
}

}  // namespace
}  // namespace jax_ring::standin
