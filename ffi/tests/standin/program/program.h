// program.h: programs of custom calls, run on the stand-in's GPUs like in XLA: with one thread per GPU.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/groups/communicator.h"
#include "tests/standin/program/call_frame.h"
#include "tests/standin/runtime/streams.h"
#include "tests/support/reference.h"

namespace jax_ring::standin {

using cpu::testing::Bytes;
using cpu::testing::OffsetBuffer;

// A collective, and its operands.
struct CallSpec {
  std::vector<gpu::Member> members;  // group after group, in rank order
  int num_groups = 1;                // of equal size
  Plan plan = {};
  std::vector<size_t> counts = {1000};
  DType dtype = DType::f32;
  Op op = Op::sum;
  std::string algorithm = "auto";
  int lane = 0;
  std::string call = "ring_psum of float32[1000] over axis 'x'";
  // With Order::tree: a group's members in a tree over this many ranks, with this many shards each, if they are not all
  // of it.
  int shards_per_rank = 1;
  int ranks_of_tree = 0;
  std::vector<int> tree_ranks = {};
};

// One process's GPUs: their ids by CUDA ordinal, and one XLA stream each.
class Gpus {
 public:
  explicit Gpus(std::vector<int64_t> ids);
  int count() const { return static_cast<int>(ids_.size()); }
  int64_t id(int gpu) const { return ids_[gpu]; }
  cudaStream_t stream(int gpu) const { return streams_[gpu].get(); }

 private:
  std::vector<int64_t> ids_;
  std::vector<std::unique_ptr<CUstream_st>> streams_;
};

// One custom call of a program, with all ranks' operands and results, including those in other processes.
class Call {
 public:
  Call(CallSpec what, unsigned seed);

  // Compiles the call. Throws std::runtime_error with the handler's message.
  void instantiate();
  // The sums along a tree: their number per group, and the slots of an operand.
  int num_results() const { return tree_ ? static_cast<int>(tree_->roots().size()) : 1; }
  int num_slots() const { return tree_ ? tree_->num_slots() : 1; }
  Instruction& instruction() { return *instruction_; }
  int group_size() const { return static_cast<int>(what_.members.size()) / what_.num_groups; }
  // A GPU's place among the members; -1: none.
  int place_of(int process, int64_t device) const;
  Invocation invocation(int place, int gpu, cudaStream_t stream, int64_t run_id);
  void expect_result(int place);
  bool is_poisoned(int place);
  void clear_results();
  const CallSpec& what() const { return what_; }

 private:
  CallSpec what_;
  std::optional<cpu::testing::ReferenceTree> tree_;
  std::vector<std::vector<Bytes>> operands_;        // by operand, then place
  std::vector<std::vector<OffsetBuffer>> inputs_;   // by place, then operand
  std::vector<std::vector<OffsetBuffer>> outputs_;  // likewise
  std::unique_ptr<Instruction> instruction_;
};

enum class Mode {
  stream,    // calls are executed on XLA's stream
  recorded,  // XLA records the calls as a graph in the second run, and launches it from then on
};

// XLA's other actions in a run, on each GPU's thread.
struct Hooks {
  std::function<void(int gpu)> before_initialize, before_execute;
};

// A program that all of the process's GPUs run at the same time.
class Program {
 public:
  Program(int process, Gpus& gpus, std::vector<Call*> calls, Mode mode = Mode::stream);
  ~Program();

  // Runs it once on these GPUs, or on all, and waits for them. Returns each GPU's first error, or an empty string.
  std::vector<std::string> run(const std::vector<int>& on = {}, const Hooks& hooks = {});

  // Like run(), but all GPUs must succeed, with the right results.
  void run_and_check(const Hooks& hooks = {});

  // Runs it until GPUs no longer wait for each other on the host, as they do in its first runs.
  void warm_up();

 private:
  std::string run_on(int gpu, int64_t run_id, const Hooks& hooks);
  std::string execute_all(int gpu, int64_t run_id, cudaStream_t stream);

  int process_;
  Gpus& gpus_;
  std::vector<Call*> calls_;
  Mode mode_;
  std::vector<int> runs_;                // by GPU
  std::vector<cudaGraphExec_t> graphs_;  // likewise
};

}  // namespace jax_ring::standin
