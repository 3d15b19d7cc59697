// engine.h: executes the collective of a complete rendezvous.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "cpu/fold/fold_kernels.h"
#include "cpu/rendezvous/rendezvous.h"

namespace jax_ring::cpu {

// The threads that share the work: XLA's pool, or a test's.
class Workers {
 public:
  virtual ~Workers() = default;
  virtual int num_threads() const = 0;
  virtual void schedule(std::function<void()> task) = 0;
};

// What all ranks of a call agree on.
struct Message {
  DType dtype;
  std::vector<size_t> counts;  // elements of each operand
  Plan plan = {};
  Op op = Op::sum;
  // For Order::tree: the group's tree, which outlives the call. An operand then has one slot of `count` elements per
  // slot of the tree, one after the other.
  const Tree* tree = nullptr;
  int num_results = 1;                                        // of a reduce-scatter, see num_parts()
  std::shared_ptr<const std::vector<Part>> slices = nullptr;  // slices of the plan, kept alive as long as it
  Conversion conversion = {};                                 // for a part of an array; `counts` are in its elements
  bool blocks_apart = false;  // of an all-to-all: operand i is the block for rank i, result i that from rank i

  size_t operand_element_bytes() const {
    return conversion.kernel != nullptr ? conversion.operand_bytes : element_size(dtype);
  }
  size_t result_element_bytes() const {
    return conversion.kernel != nullptr ? conversion.result_bytes : element_size(dtype);
  }
};

// Executes the collective and queues the ranks' completions on CompletionThreads. Returns at once or after doing part
// of the work, and never waits for another thread. The rendezvous's buffers must stay valid until its completions have
// run. Terminates the process if the little memory for bookkeeping cannot be allocated: the ranks would wait forever.
void run_collective(RendezvousPtr rendezvous, const Message& message, Workers& workers) noexcept;

// Does so on another thread, which may take its time, so that the caller's rank goes on with its next call.
void run_collective_beside(RendezvousPtr rendezvous, const Message& message) noexcept;

}  // namespace jax_ring::cpu
