// call_site.h: the decoded attributes of a call instruction, once for all its executions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attributes/attributes.h"
#include "base/hash.h"
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
  explicit CallSite(Attributes attributes);
  const uint64_t number = next_number.fetch_add(1, std::memory_order_relaxed);  // unique among call sites
  const Attributes call;
  RendezvousMap rendezvous_map;
  flight::RecordedCall* recorded = nullptr;
  // For groups that span several processes.
  std::shared_ptr<const std::string> text;  // for error messages
  Hash hash;                                // of the call's identity, the same in all processes
  std::vector<std::optional<CrossProcessGroup>>
      groups;  // nullopt if a group is within one process, or has no rank here

 private:
  static std::atomic<uint64_t> next_number;
};

}  // namespace jax_ring::cpu
