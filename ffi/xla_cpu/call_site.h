// call_site.h: what a call instruction says of itself, once for all its executions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attributes/trees.h"
#include "base/hash.h"
#include "collective/collective.h"
#include "cpu/rendezvous/rendezvous.h"
#include "recorder/flight_recorder.h"
#include "shm/group/communicators.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// A group that spans several processes.
struct CrossProcessGroup {
  std::shared_ptr<shm::Communicator> communicator;
  Thresholds thresholds;
  std::unique_ptr<shm::LaunchIds> launch_ids;  // of this call in this group
};

// One per call instruction and process, owned by the runtime.
struct CallSite {
  static xla::ffi::TypeId id;
  CallSite(ReplicaGroups groups, std::string text, const Plan& of_call, std::vector<int> all_sources, Op op)
      : rendezvous_map(std::move(groups), text),
        plan(of_call),
        sources(std::move(all_sources)),
        op(op),
        text(std::make_shared<std::string>(std::move(text))) {
    plan.sources = sources.data();
  }
  const uint64_t number = next_number.fetch_add(1, std::memory_order_relaxed);  // of no other call site
  RendezvousMap rendezvous_map;
  Plan plan;
  std::vector<int> sources;                                    // of the plan
  std::vector<int64_t> part;                                   // of an array
  xla::ffi::DataType rounds_to = xla::ffi::DataType::INVALID;  // what a reduce-scatter of a part rounds to, if it does
  Op op;
  flight::RecordedCall* recorded = nullptr;
  Trees trees;
  // For groups that span several processes.
  std::shared_ptr<const std::string> text;  // for error messages
  std::optional<Algorithm> algorithm;
  Hash hash;  // of what identifies the call, the same in all processes
  std::vector<std::optional<CrossProcessGroup>>
      groups;  // nullopt if a group is within one process, or has no rank here

 private:
  static std::atomic<uint64_t> next_number;
};

}  // namespace jax_ring::cpu
