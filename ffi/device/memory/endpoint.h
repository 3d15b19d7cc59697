// endpoint.h: a rank's view of its group: all mailboxes, its progress, and its failure record.
#pragma once

#include <cstdint>

#include "device/memory/mailbox.h"

namespace jax_ring {

// Where a rank was when it failed.
enum class Step : uint32_t { one_shot, reduce_scatter, all_gather, ring_receive, ring_send, start, count };

enum class FailureKind : uint32_t {
  none,
  timeout,
  mismatch,
  busy,  // two calls of this rank ran at the same time in one lane
};

// A rank's first failure, in host memory that the GPU can write. `kind` is written last.
struct Failure {
  uint32_t kind;
  uint32_t step;
  int32_t rank;
  int32_t peer;
  uint32_t epoch;
  uint32_t call;
  uint32_t cta;
};

// How far each of a rank's teams is, over all calls so far. In device memory, because a CUDA graph replays without the
// host. The counters wrap around.
struct Progress {
  // kBusy, and in the lower half the last epoch of one-shot: a call takes its lane and learns its epoch in one access.
  uint64_t turn;
  uint32_t round;     // steps of the two-shot algorithm
  uint32_t sent;      // items sent around the ring
  uint32_t received;  // items received around the ring

  // A call is running. Two at a time would read the same counters, send under the same tags, and take each other's data
  // for their own.
  static constexpr uint64_t kBusy = uint64_t{1} << 32;

  JAX_RING_INLINE bool is_busy() const { return (turn & kBusy) != 0; }
  JAX_RING_INLINE uint32_t one_shot_epoch() const { return static_cast<uint32_t>(turn); }
};

constexpr int kMaxRanks = 64;

// A rank's knowledge of its group.
struct Endpoint {
  Capacity capacity;
  int rank;
  uint32_t call;                      // copied into the record of a failure
  unsigned char* mailbox[kMaxRanks];  // of all ranks, at this rank's addresses
  unsigned char* multicast;  // address where multimem instructions reach all mailboxes; null if the group has none
  Progress* progress;        // by team
  uint32_t* failed;          // set once any team of this rank has failed
  Failure* failure;
  uint64_t deadline_ns;

  JAX_RING_INLINE int num_ranks() const { return capacity.num_ranks; }
  // The flag of `kind` in the mailbox of rank `owner`, set by `peer`.
  JAX_RING_INLINE uint64_t* flag(int owner, FlagKind kind, int cta, int peer) const {
    return reinterpret_cast<uint64_t*>(mailbox[owner] + capacity.flag(kind, cta, peer));
  }
};

}  // namespace jax_ring
