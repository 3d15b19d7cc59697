// program.cc: builds the attributes and buffers of calls, and runs their stages in XLA's order.
#include "tests/standin/program/program.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "attributes/attributes.h"
#include "tests/standin/runtime/machine.h"

namespace jax_ring::standin {
namespace {

using namespace cpu::testing;
using cpu::element_size;

XLA_FFI_DataType xla_type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return XLA_FFI_DataType_F32;
    case DType::bf16:
      return XLA_FFI_DataType_BF16;
    case DType::u32:
      return XLA_FFI_DataType_U32;
    case DType::s32:
      return XLA_FFI_DataType_S32;
    case DType::u8:
      return XLA_FFI_DataType_U8;
    case DType::f64:
      return XLA_FFI_DataType_F64;
    default:
      throw std::invalid_argument("the stand-in has no such type");
  }
}

// A group's ranks in its tree.
std::vector<int> ranks_of(const CallSpec& what) {
  if (!what.tree_ranks.empty()) return what.tree_ranks;
  std::vector<int> ranks(what.members.size() / what.num_groups);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}
int size_of_tree(const CallSpec& what) {
  return what.tree_ranks.empty() ? static_cast<int>(ranks_of(what).size()) : what.ranks_of_tree;
}

Attributes attributes_of(const CallSpec& what) {
  const int64_t size = static_cast<int64_t>(what.members.size()) / what.num_groups;
  Attributes all = testing::call_attributes(0, std::string(kCollectives[static_cast<int>(what.plan.collective)]));
  const auto numbers = [&](const char* name) -> std::vector<int64_t>& {
    return std::get<std::vector<int64_t>>(all.at(name));
  };
  for (const gpu::Member& member : what.members) {
    numbers("processes").push_back(member.process);
    numbers("members").push_back(member.device);
  }
  const Thresholds thresholds = default_thresholds(static_cast<int>(size));
  numbers("group_sizes").assign(what.num_groups, size);
  numbers("one_shot_bytes").assign(what.num_groups, static_cast<int64_t>(thresholds.one_shot));
  numbers("two_shot_bytes").assign(what.num_groups, static_cast<int64_t>(thresholds.two_shot));
  for (int group = 0; group < what.num_groups && folds_along_tree(what.plan); ++group) {
    numbers("tree_shards").push_back(int64_t{what.shards_per_rank} * size_of_tree(what));
    numbers("tree_sizes").push_back(size_of_tree(what));
    for (int rank : ranks_of(what)) numbers("tree_ranks").push_back(rank);
  }
  if (what.plan.collective == Collective::permute) {
    numbers("sources").assign(what.plan.sources, what.plan.sources + size);
  }
  all["op"] = std::string(kOps[static_cast<int>(what.op)]);
  all["order"] = std::string(kOrders[static_cast<int>(what.plan.order)]);
  all["root"] = int64_t{what.plan.root};
  all["algorithm"] = what.algorithm;
  all["call"] = what.call;
  all["site"] = "train.py:7";
  all["lane"] = int64_t{what.lane};
  return all;
}

}  // namespace

Gpus::Gpus(std::vector<int64_t> ids) : ids_(std::move(ids)) {
  for (int gpu = 0; gpu < count(); ++gpu) {
    streams_.push_back(std::make_unique<CUstream_st>(gpu, cudaStreamNonBlocking));
  }
}

Call::Call(CallSpec what, unsigned seed) : what_(std::move(what)) {
  const int places = static_cast<int>(what_.members.size());
  if (folds_along_tree(what_.plan)) {
    tree_.emplace(what_.shards_per_rank * size_of_tree(what_), size_of_tree(what_), ranks_of(what_));
  }
  inputs_.resize(places);
  outputs_.resize(places);
  for (size_t count : what_.counts) {
    const std::vector<Bytes> slots = random_elements(what_.dtype, places * num_slots(), count, seed++);
    operands_.emplace_back(places);
    for (size_t i = 0; i < slots.size(); ++i) {
      operands_.back()[i / num_slots()].append(slots[i]);
    }
    const size_t bytes = num_results() * result_count(what_.plan, group_size(), count) * element_size(what_.dtype);
    for (int place = 0; place < places; ++place) {
      inputs_[place].emplace_back(operands_.back()[place], 0);
      outputs_[place].emplace_back(Bytes(bytes, 0xa5), 0);
    }
  }
}

void Call::instantiate() { instruction_ = std::make_unique<Instruction>(attributes_of(what_)); }

int Call::place_of(int process, int64_t device) const {
  for (size_t place = 0; place < what_.members.size(); ++place) {
    if (what_.members[place] == gpu::Member{process, device}) return static_cast<int>(place);
  }
  return -1;
}

Invocation Call::invocation(int place, int gpu, cudaStream_t stream, int64_t run_id) {
  Invocation invocation{gpu, stream, run_id, {}, {}};
  const auto add = [&](std::vector<OffsetBuffer>& buffers, std::vector<DeviceBuffer>& to) {
    for (OffsetBuffer& buffer : buffers) {
      to.push_back(
          {xla_type_of(what_.dtype), buffer.data(), static_cast<int64_t>(buffer.size() / element_size(what_.dtype))});
    }
  };
  add(inputs_[place], invocation.operands);
  add(outputs_[place], invocation.results);
  return invocation;
}

void Call::expect_result(int place) {
  const int size = group_size(), rank = place % size;
  for (size_t i = 0; i < what_.counts.size(); ++i) {
    const auto first = operands_[i].begin() + (place - rank);
    const std::vector<Bytes> of_group(first, first + size);
    // A switch adds in the order of ranks here.
    const Plan plan = with_order_for(what_.plan, what_.algorithm == "ring" ? Algorithm::ring : Algorithm::two_shot);
    const Bytes want = tree_ ? expected_tree_result(plan, what_.op, what_.dtype, *tree_, of_group, what_.counts[i],
                                                    num_results(), rank)
                             : expected_result(plan, what_.op, what_.dtype, of_group, what_.counts[i], rank);
    const auto difference =
        first_difference(what_.dtype, outputs_[place][i].data(), want.data(), want.size() / element_size(what_.dtype));
    ASSERT_FALSE(difference) << describe(what_.plan, size, what_.counts[i]) << ", " << what_.algorithm << ", "
                             << name_of(what_.dtype) << ", rank " << rank << ", operand " << i
                             << ": the first wrong element is " << *difference;
  }
}

bool Call::is_poisoned(int place) {
  for (OffsetBuffer& output : outputs_[place]) {
    for (size_t i = 0; i < output.size(); ++i) {
      if (output.data()[i] != 0xff) return false;
    }
  }
  return true;
}

void Call::clear_results() {
  for (auto& of_place : outputs_) {
    for (OffsetBuffer& output : of_place) std::fill(output.data(), output.data() + output.size(), 0xa5);
  }
}

Program::Program(int process, Gpus& gpus, std::vector<Call*> calls, Mode mode)
    : process_(process),
      gpus_(gpus),
      calls_(std::move(calls)),
      mode_(mode),
      runs_(gpus.count()),
      graphs_(gpus.count()) {
  for (Call* call : calls_) call->instantiate();
}

Program::~Program() {
  for (cudaGraphExec_t graph : graphs_) {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
}

std::vector<std::string> Program::run(const std::vector<int>& on, const Hooks& hooks) {
  const int64_t run_id = next_run_id();
  std::vector<std::string> errors(gpus_.count());
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < gpus_.count(); ++gpu) {
    if (!on.empty() && std::find(on.begin(), on.end(), gpu) == on.end()) continue;
    threads.emplace_back([&, gpu] { errors[gpu] = run_on(gpu, run_id, hooks); });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::string Program::run_on(int gpu, int64_t run_id, const Hooks& hooks) {
  Machine::instance().create_context(gpu, "XLA");
  set_current_gpu(gpu);
  const cudaStream_t stream = gpus_.stream(gpu);
  if (hooks.before_initialize) hooks.before_initialize(gpu);
  for (Call* call : calls_) {
    const int place = call->place_of(process_, gpus_.id(gpu));
    const std::string error = call->instruction().initialize(call->invocation(place, gpu, stream, run_id));
    if (!error.empty()) return error;
  }
  if (hooks.before_execute) hooks.before_execute(gpu);
  if (mode_ == Mode::stream || runs_[gpu]++ == 0) {
    const std::string error = execute_all(gpu, run_id, stream);
    return cudaStreamSynchronize(stream) == cudaSuccess || !error.empty() ? error : "the stream does not end";
  }
  if (graphs_[gpu] == nullptr) {
    CUstream_st recording(gpu, cudaStreamNonBlocking);
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(&recording, cudaStreamCaptureModeThreadLocal);
    const std::string error = execute_all(gpu, run_id, &recording);
    const cudaError_t captured = cudaStreamEndCapture(&recording, &graph);
    if (!error.empty()) return error;
    if (captured != cudaSuccess) return std::string("the capture failed: ") + cudaGetErrorName(captured);
    cudaGraphInstantiate(&graphs_[gpu], graph, 0);
    cudaGraphDestroy(graph);
  }
  cudaGraphLaunch(graphs_[gpu], stream);
  return cudaStreamSynchronize(stream) == cudaSuccess ? "" : "the stream does not end";
}

std::string Program::execute_all(int gpu, int64_t run_id, cudaStream_t stream) {
  for (Call* call : calls_) {
    const int place = call->place_of(process_, gpus_.id(gpu));
    const std::string error = call->instruction().execute(call->invocation(place, gpu, stream, run_id));
    if (!error.empty()) return error;
  }
  return "";
}

void Program::run_and_check(const Hooks& hooks) {
  for (Call* call : calls_) call->clear_results();
  const std::vector<std::string> errors = run({}, hooks);
  for (int gpu = 0; gpu < gpus_.count(); ++gpu) {
    ASSERT_EQ(errors[gpu], "") << "GPU " << gpu;
    for (Call* call : calls_) call->expect_result(call->place_of(process_, gpus_.id(gpu)));
  }
}

void Program::warm_up() {
  for (int run = 0; run < 3; ++run) run_and_check();
}

}  // namespace jax_ring::standin
