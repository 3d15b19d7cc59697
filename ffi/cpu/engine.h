// engine.h: carries out the collective of a complete rendezvous.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "cpu/fold_kernels.h"
#include "cpu/rendezvous.h"
#include "ring/collective.h"

namespace jax_ring::cpu {

// Threads that the work may be spread over.
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
};

// Runs the collective, and has the participants told by the Relay. Returns at once or after having done a part of the
// work; never waits for another thread. The meeting's buffers must stay valid until its participants are told. Ends the
// process if memory for its few words of bookkeeping runs out: the ranks would wait for ever.
void run_collective(RendezvousPtr rendezvous, const Message& message, Workers& workers) noexcept;

}  // namespace jax_ring::cpu
