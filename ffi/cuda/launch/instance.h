// instance.h: a call instruction of a program, with its groups of GPUs.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "attributes/attributes.h"
#include "cuda/groups/communicators.h"
#include "cuda/launch/first_run.h"
#include "cuda/launch/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::gpu {

// XLA numbers GPUs by CUDA ordinal. No host has more.
constexpr int kMaxOrdinals = 64;

// One per call instruction and process, owned by the runtime.
struct Instance {
  static xla::ffi::TypeId id;

  struct Group {
    std::vector<Member> members;
    Thresholds thresholds;
    std::optional<TreeProgram> tree;  // with Order::tree
    // Below: groups with GPUs of this process, from their first execution on.
    std::shared_ptr<Communicator> communicator;
    std::unique_ptr<FirstRun> launching, launched;
  };

  // A GPU of this process in the call.
  struct Rank {
    Group* group;
    int rank;   // in the group
    int local;  // among this process's GPUs in the group
    int index;  // among this process's GPUs in the call
  };

  explicit Instance(Attributes attributes) : call(std::move(attributes)) {}

  const Attributes call;
  CallSite site;
  std::vector<Group> groups;

  // By CUDA ordinal; null until the GPU's group is connected. Executions read it without a lock.
  std::array<std::atomic<const Rank*>, kMaxOrdinals> rank_of{};

  std::mutex mutex;  // guards the fields below and the groups; no wait happens under it
  std::unique_ptr<FirstRun> initializing, initialized;
  std::vector<std::unique_ptr<const Rank>> ranks;
};

// Throws std::invalid_argument, with the call in its text, if the kernels cannot serve it.
std::unique_ptr<Instance> instance_of(Attributes call);

}  // namespace jax_ring::gpu
