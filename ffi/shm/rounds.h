// rounds.h: how the processes of a group share a collective out: in rounds, as much in each as the shared memory holds.
//
// Who needs another's values reads them from where that one has staged them; the values of its own ranks it reads where
// they are. In each round every process stages, and then folds the pieces that it owns:
//
//   one step    A piece is folded by the process of its one receiver (reduce-scatter, reduce), or by everybody for
//               himself: where there is nothing to fold (all-gather, broadcast), and where the message is small.
//   two steps   Of an all-reduce that is not small everybody folds a share, and the others read the result from it.
#pragma once

#include <cstddef>
#include <vector>

#include "cpu/engine.h"
#include "ring/collective.h"
#include "shm/group.h"

namespace jax_ring::shm {

// Bytes that each process has in each of the two sets of shared memory that take turns.
struct Capacity {
  size_t staging;
  size_t results;
};

constexpr int kEveryone = -1;

// What is folded at a time.
struct Piece {
  size_t operand;
  Part part;         // cut to this piece
  int owner;         // the process that folds it
  size_t stride;     // from the staged values of one rank of a process to those of the next
  size_t result_at;  // of the owner's results; of use in two steps alone
};

struct Round {
  std::vector<Piece> pieces;
  std::vector<size_t> staged_at;  // of each process's staging, by piece, then process

  size_t staged(size_t piece, int process, int num_processes) const {
    return staged_at[piece * num_processes + process];
  }
};

// The rounds of one call, in order. All processes come to the same ones.
class Rounds {
 public:
  Rounds(const Group& group, const Capacity& capacity);

  // Begins anew. one_shot: whether a sum for all ranks is made in one step.
  void begin(const cpu::Message& message, bool one_shot);

  // The next round; false if there is none.
  bool next(Round& round);

  // Whether the owners of pieces have to hand out their results.
  bool publishes_results() const { return publishes_results_; }

 private:
  struct Owned {
    Part part;
    int owner;
  };

  void partition_operand();
  int owner_of(const Part& part, int index) const;
  int num_sources(const Part& part, int process) const;
  bool publishes_result(const Owned& owned) const { return owned.owner != kEveryone && owned.part.receivers.count > 1; }
  size_t chunk_bytes() const;
  bool add_slice(Round& round);

  const Group& group_;
  const Capacity capacity_;
  const cpu::Message* message_ = nullptr;
  bool one_shot_ = false;
  bool publishes_results_ = false;
  size_t operand_ = 0;
  std::vector<Owned> parts_;                                             // of the operand
  size_t offset_ = 0;                                                    // of the next slice, in each part
  size_t chunk_ = 0;                                                     // elements of a part in a slice
  std::vector<size_t> staging_used_, results_used_, staging_, results_;  // by process
};

}  // namespace jax_ring::shm
