// rounds.h: divides a collective among a group's processes, and into rounds that fit the shared memory.
//
// A process reads other processes' contributions from their staging areas, and its own ranks' values in place. In each
// round every process stages, then folds the pieces that it owns:
//
//   one step    A piece is folded by the process of its only receiver (reduce-scatter, reduce). Every process folds it
//               where there is nothing to compute (all-gather, broadcast), and where the message is small (one-shot).
//   two steps   In a larger all-reduce every process folds a share, and the others copy the result from it.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/collective.h"
#include "cpu/engine.h"
#include "shm/exchange/sources.h"
#include "shm/group/group.h"

namespace jax_ring::shm {

// Bytes per process in each of the two alternating sets of shared memory.
struct Capacity {
  size_t staging;
  size_t results;
};

// By level: of a group's first segment, then of larger ones.
using Capacities = std::vector<Capacity>;

// A group's capacities: enough at each level for any of its calls.
Capacities capacities_of(const Group& group);

constexpr int kEveryone = -1;

// If no process stages more than one value in a round, of up to this size, it stages it beside the signals: a peer
// finds both in one cache line.
constexpr size_t kTinyBytes = 8;

// The unit of folding.
struct Piece {
  size_t operand;
  Part part;         // restricted to this piece, with its places in Rounds::sources()
  int owner;         // the process that folds it
  size_t stride;     // distance between staged sources in a process
  size_t result_at;  // offset in the owner's results; only in two steps
};

struct Round {
  std::vector<Piece> pieces;
  std::vector<size_t> staged_at;  // offset in each process's staging, by piece, then process
  bool is_tiny = false;           // see kTinyBytes

  size_t staged(size_t piece, int process, int num_processes) const {
    return staged_at[piece * num_processes + process];
  }
};

// The rounds of one call, in order, the same in all processes.
class Rounds {
 public:
  explicit Rounds(const Group& group);

  // Starts over with another call. one_shot: whether an all-reduce takes one step.
  void begin(const cpu::Message& message, bool one_shot, const Capacity& capacity);

  // The next round; false if there is none.
  bool next(Round& round);

  // Whether the owners of pieces publish results for others to copy.
  bool publishes_results() const { return publishes_results_; }

  const Sources& sources() const { return sources_; }

 private:
  struct Owned {
    Part part;
    int owner;
  };

  void partition_operand();
  int owner_of(const Part& part, int index) const;
  int num_staged(const Owned& owned, int process) const;
  bool publishes_result(const Owned& owned) const { return owned.owner != kEveryone && owned.part.receivers.count > 1; }
  size_t chunk_bytes() const;
  bool is_tiny(const Round& round) const;
  bool add_slice(Round& round);
  bool add_piece(Round& round, const Owned& owned);

  const Group& group_;
  Capacity capacity_{};
  Sources sources_;
  const cpu::Message* message_ = nullptr;
  bool one_shot_ = false;
  bool publishes_results_ = false;
  size_t operand_ = 0;
  std::vector<Owned> parts_;                                             // of the current operand
  size_t offset_ = 0;                                                    // of the next slice, in each part
  size_t next_part_ = 0;                                                 // of the slice
  size_t chunk_ = 0;                                                     // elements of a part in a slice
  std::vector<size_t> staging_used_, results_used_, staging_, results_;  // by process
};

}  // namespace jax_ring::shm
