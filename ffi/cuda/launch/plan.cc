// plan.cc: packs operands into messages, and selects their algorithm.
#include "cuda/launch/plan.h"

#include <algorithm>
#include <stdexcept>

#include "base/hash.h"
#include "device/fold/kernel_fold.h"
#include "device/fold/switch_adds.h"

namespace jax_ring::gpu {
namespace {

// The algorithm for a call with `bytes` bytes per rank. The caller may choose it for the sum of an all-reduce. A sum
// for one root may use the ring instead of two-shot.
Algorithm algorithm_of(const CallSite& site, uint64_t bytes, const Thresholds& thresholds) {
  if (site.op != Op::sum) return Algorithm::two_shot;
  if (requires_ring(site.plan)) return Algorithm::ring;
  if (site.plan.collective == Collective::all_reduce) return site.algorithm.value_or(choose(bytes, thresholds));
  const bool uses_ring = site.plan.collective == Collective::reduce && site.algorithm == Algorithm::ring;
  return uses_ring ? Algorithm::ring : Algorithm::two_shot;
}

// Whether an NVSwitch adds instead: only where both order and algorithm are the engine's choice. One-shot stays if
// chosen, as it saves a step.
bool adds_in_switch(const CallSite& requested, const KernelKey& kernel, const Endpoint& self) {
  return self.multicast != nullptr && requested.plan.order == Order::any && !requested.algorithm &&
         requested.plan.collective == Collective::all_reduce && kernel.op == Op::sum &&
         kernel.algorithm != Algorithm::one_shot && switch_adds(kernel.dtype);
}

uint64_t hash_of(const TreeProgram& tree) {
  return Hash().add(tree.term).add(tree.merges).add(tree.end).add(tree.num_results).add(tree.num_slots).value();
}

uint64_t hash_of_sources(const Plan& plan, int num_ranks) {
  Hash hash;
  for (int rank = 0; plan.collective == Collective::permute && rank < num_ranks; ++rank) hash.add(plan.sources[rank]);
  return hash.value();
}

}  // namespace

uint32_t CallSite::fingerprint() const { return Hash().add(std::string_view(call)).value32(); }

std::vector<Launch> launches_of(const Communicator& communicator, int rank, const CallSite& requested,
                                const Thresholds& thresholds, DType dtype, const std::vector<Buffer>& buffers,
                                double deadline_seconds, const TreeProgram* tree) {
  CallSite site = requested;
  const uint64_t slots = tree == nullptr ? 1 : tree->num_slots;
  if (slots > communicator.capacity().part_packs) {
    throw std::invalid_argument("the " + std::to_string(slots) + " slots of an operand do not fit into a mailbox of " +
                                std::to_string(communicator.capacity().part_packs) + " packs");
  }
  // Use the requested algorithm, not the chosen one: the order decides which operands share a message.
  site.plan = with_order_for(site.plan, site.algorithm.value_or(Algorithm::two_shot));
  if (site.op != Op::sum) site.plan.order = Order::rank;  // never by a ring, and the same in any order
  // The blocks of a ring belong to one operand, so there each operand is a message of its own.
  const size_t most = requires_ring(site.plan) ? 1 : kMaxOperands;
  const uint64_t blocks = num_input_blocks(site.plan, communicator.num_ranks());
  // Data that is only moved is bytes.
  const KernelFold fold = kernel_fold(only_moves(site.plan) ? DType::u8 : dtype, site.op);
  std::vector<Launch> launches;
  for (size_t first = 0; first < buffers.size(); first += most) {
    Launch launch{};
    Message& message = launch.call.message;
    uint64_t bytes = 0;
    Hash sizes;
    for (size_t i = first; i < std::min(first + most, buffers.size()); ++i) {
      const Buffer& buffer = buffers[i];
      if (buffer.input_bytes == 0) continue;
      const uint64_t block_bytes = buffer.input_bytes / (blocks * slots);
      message.operands[message.num_operands++] = {static_cast<const unsigned char*>(buffer.input),
                                                  static_cast<unsigned char*>(buffer.output), block_bytes,
                                                  message.num_packs};
      message.num_packs += ceil_div(block_bytes, kPackBytes);
      bytes += block_bytes;
      sizes.add(block_bytes);
    }
    if (message.num_packs == 0) continue;
    // Send all slots.
    launch.kernel = {fold.dtype, fold.op, algorithm_of(site, bytes * slots, thresholds)};
    launch.call.plan = site.plan;
    launch.call.plan.sources = nullptr;  // host memory
    if (tree != nullptr) {
      launch.kernel.along_tree = true;
      launch.call.tree = *tree;
      const bool fits = slots <= communicator.capacity().one_shot_packs;
      if (launch.kernel.algorithm == Algorithm::one_shot && !fits) launch.kernel.algorithm = Algorithm::two_shot;
    }
    launch.call.self = communicator.endpoint(rank, site.lane, site.fingerprint(), deadline_seconds);
    if (adds_in_switch(requested, launch.kernel, launch.call.self)) launch.kernel.algorithm = Algorithm::multicast;
    message.num_blocks = num_blocks(site.plan, communicator.num_ranks(), slots);
    message.flipped = fold.flipped;
    message.route = route_of(site.plan, communicator.num_ranks(), rank);
    message.fingerprint = Hash()
                              .add(hash_of_sources(site.plan, communicator.num_ranks()))
                              .add(tree == nullptr ? uint64_t{0} : hash_of(*tree))
                              .add(site.fingerprint())
                              .add(launch.kernel.dtype)
                              .add(launch.kernel.op)
                              .add(fold.flipped)
                              .add(launch.kernel.algorithm)
                              .add(site.plan.collective)
                              .add(site.plan.order)
                              .add(site.plan.root)
                              .add(static_cast<uint64_t>(first))
                              .add(sizes.value())
                              .value32();
    launches.push_back(launch);
  }
  return launches;
}

}  // namespace jax_ring::gpu
