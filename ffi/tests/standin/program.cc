// program.cc: builds the attributes and buffers of calls, and runs their stages in XLA's order.
#include "standin/program.h"

#include <stdexcept>
#include <thread>

#include "standin/machine.h"

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

Attributes attributes_of(const CallSpec& what) {
  const char* const collectives[] = {"all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"};
  const char* const ops[] = {"sum", "max", "min"};
  const char* const orders[] = {"rank", "ring"};
  std::vector<int64_t> processes, devices;
  for (const gpu::Member& member : what.members) {
    processes.push_back(member.process);
    devices.push_back(member.device);
  }
  const int64_t size = static_cast<int64_t>(what.members.size());
  const Thresholds thresholds = default_thresholds(static_cast<int>(size));
  return {{"collective", std::string(collectives[static_cast<int>(what.plan.collective)])},
          {"op", std::string(ops[static_cast<int>(what.op)])},
          {"root", int64_t{what.plan.root}},
          {"algorithm", what.algorithm},
          {"order", std::string(orders[static_cast<int>(what.plan.order)])},
          {"processes", processes},
          {"devices", devices},
          {"group_sizes", std::vector<int64_t>{size}},
          {"one_shot_bytes", std::vector<int64_t>{static_cast<int64_t>(thresholds.one_shot)}},
          {"two_shot_bytes", std::vector<int64_t>{static_cast<int64_t>(thresholds.two_shot)}},
          {"call", what.call},
          {"site", std::string("train.py:7")},
          {"lane", int64_t{what.lane}}};
}

}  // namespace

Gpus::Gpus(std::vector<int64_t> ids) : ids_(std::move(ids)) {
  for (int gpu = 0; gpu < count(); ++gpu) {
    streams_.push_back(std::make_unique<CUstream_st>(gpu, cudaStreamNonBlocking));
  }
}

Call::Call(CallSpec what, unsigned seed) : what_(std::move(what)) {
  const int num_ranks = static_cast<int>(what_.members.size());
  inputs_.resize(num_ranks);
  outputs_.resize(num_ranks);
  for (size_t count : what_.counts) {
    operands_.push_back(random_elements(what_.dtype, num_ranks, count, seed++));
    const size_t bytes = result_count(what_.plan, num_ranks, count) * element_size(what_.dtype);
    for (int rank = 0; rank < num_ranks; ++rank) {
      inputs_[rank].emplace_back(operands_.back()[rank], 0);
      outputs_[rank].emplace_back(Bytes(bytes, 0xa5), 0);
    }
  }
}

void Call::instantiate() { instruction_ = std::make_unique<Instruction>(attributes_of(what_)); }

int Call::rank_of(int process, int64_t device) const {
  for (size_t rank = 0; rank < what_.members.size(); ++rank) {
    if (what_.members[rank] == gpu::Member{process, device}) return static_cast<int>(rank);
  }
  return -1;
}

Invocation Call::invocation(int rank, int gpu, cudaStream_t stream, int64_t run_id) {
  Invocation invocation{gpu, stream, run_id, {}, {}};
  const auto add = [&](std::vector<OffsetBuffer>& buffers, std::vector<DeviceBuffer>& to) {
    for (OffsetBuffer& buffer : buffers) {
      to.push_back(
          {xla_type_of(what_.dtype), buffer.data(), static_cast<int64_t>(buffer.size() / element_size(what_.dtype))});
    }
  };
  add(inputs_[rank], invocation.operands);
  add(outputs_[rank], invocation.results);
  return invocation;
}

void Call::expect_result(int rank) {
  const int num_ranks = static_cast<int>(what_.members.size());
  for (size_t i = 0; i < what_.counts.size(); ++i) {
    const Bytes want = expected_result(what_.plan, what_.op, what_.dtype, operands_[i], what_.counts[i], rank);
    const auto difference =
        first_difference(what_.dtype, outputs_[rank][i].data(), want.data(), want.size() / element_size(what_.dtype));
    ASSERT_FALSE(difference) << describe(what_.plan, num_ranks, what_.counts[i]) << ", " << what_.algorithm << ", "
                             << name_of(what_.dtype) << ", rank " << rank << ", operand " << i
                             << ": the first wrong element is " << *difference;
  }
}

bool Call::is_poisoned(int rank) {
  for (OffsetBuffer& output : outputs_[rank]) {
    for (size_t i = 0; i < output.size(); ++i) {
      if (output.data()[i] != 0xff) return false;
    }
  }
  return true;
}

void Call::clear_results() {
  for (auto& of_rank : outputs_) {
    for (OffsetBuffer& output : of_rank) std::fill(output.data(), output.data() + output.size(), 0xa5);
  }
}

Program::Program(int process, Gpus& gpus, std::vector<Call*> calls, Mode mode)
    : process_(process), gpus_(gpus), calls_(std::move(calls)), mode_(mode), graphs_(gpus.count()) {
  for (Call* call : calls_) call->instantiate();
}

Program::~Program() {
  for (cudaGraphExec_t graph : graphs_) {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
}

std::vector<std::string> Program::run(std::vector<int> on, std::function<void(int gpu)> before_execution) {
  if (on.empty()) {
    for (int gpu = 0; gpu < gpus_.count(); ++gpu) on.push_back(gpu);
  }
  const int64_t run_id = next_run_id();
  std::vector<std::string> errors(gpus_.count());
  std::vector<std::thread> threads;
  for (int gpu : on) {
    threads.emplace_back([&, gpu] { errors[gpu] = run_on(gpu, run_id, before_execution); });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::string Program::run_on(int gpu, int64_t run_id, const std::function<void(int gpu)>& before_execution) {
  Machine::instance().create_context(gpu, "XLA");
  set_current_gpu(gpu);
  const cudaStream_t stream = gpus_.stream(gpu);
  for (Call* call : calls_) {
    const int rank = call->rank_of(process_, gpus_.id(gpu));
    const std::string error = call->instruction().initialize(call->invocation(rank, gpu, stream, run_id));
    if (!error.empty()) return error;
  }
  if (before_execution) before_execution(gpu);
  if (mode_ == Mode::stream) {
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
    const int rank = call->rank_of(process_, gpus_.id(gpu));
    const std::string error = call->instruction().execute(call->invocation(rank, gpu, stream, run_id));
    if (!error.empty()) return error;
  }
  return "";
}

void Program::run_and_check() {
  for (Call* call : calls_) call->clear_results();
  const std::vector<std::string> errors = run();
  for (int gpu = 0; gpu < gpus_.count(); ++gpu) {
    ASSERT_EQ(errors[gpu], "") << "GPU " << gpu;
    for (Call* call : calls_) call->expect_result(call->rank_of(process_, gpus_.id(gpu)));
  }
}

}  // namespace jax_ring::standin
