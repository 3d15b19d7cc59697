// calls_of_xla.h: XLA's collectives between processes in which this process waits, for error messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// A call served by XLA. Its ranks are on several hosts, and no engine can see why it does not end.
struct CallOfXla {
  int64_t run_id;
  int64_t partition;
  std::string call;
  std::string text;                // the call, and its line in the user's program
  std::vector<int64_t> processes;  // of its ranks' communication partners and its own
  std::chrono::steady_clock::time_point begin;
};

// One per process. A call that fails in XLA stays until it is taken, or until a call of the same rank begins.
class CallsOfXla {
 public:
  static CallsOfXla& instance();

  void begin(CallOfXla call);
  void end(int64_t run_id, int64_t partition, std::string_view call);

  // The unfinished calls, oldest first.
  std::vector<CallOfXla> open() const;

  // Returns and forgets them.
  std::vector<CallOfXla> take();

 private:
  mutable std::mutex mutex_;
  std::vector<CallOfXla> calls_;
};

// The stage `execute` of `jax_ring.between_hosts`. Two such calls enclose the XLA collectives of one call.
//
// Operands: the caller's partition id (uint32 scalar), then the operands of XLA's collectives, or their results.
// Results:  these operands, unchanged; in the same buffers where XLA can.
// Attributes:
//   begins       int64: 1 before the collectives, 0 after them
//   call, site   strings: as of the collectives of the engine (attributes.h). The site is used where the call begins.
//   members, processes, group_sizes
//                int64 arrays: as of the collectives of the engine
XLA_FFI_Error* between_hosts_execute(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_ring::cpu
