// engine.cc: splits a collective over threads that take chunks as they become free.
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/float_mode.h"
#include "cpu/relay.h"
#include "ring/schedule.h"

namespace jax_ring::cpu {
namespace {

constexpr size_t kCacheLine = 64;
// A chunk is large beside the cost of taking it and small beside the message. Bytes of one rank's operand.
constexpr size_t kChunkBytes = 128 << 10;
// Below this many bytes read and written, waking another thread costs more than it saves.
constexpr size_t kParallelBytes = 2 << 20;
// Results of more bytes than this, over all ranks, would drive each other out of the caches: write them around.
constexpr size_t kPastCacheBytes = 4 << 20;

// A part of one of the operands.
struct Share {
  size_t operand;
  Part part;
};

std::vector<Share> shares_of(const Message& message, int num_ranks) {
  std::vector<Share> shares;
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    for (int i = 0; i < num_parts(message.plan, num_ranks); ++i) {
      shares.push_back(
          {operand, part_of(message.plan, num_ranks, message.counts[operand], element_size(message.dtype), i)});
    }
  }
  return shares;
}

std::vector<size_t> counts_of(const std::vector<Share>& shares) {
  std::vector<size_t> counts;
  for (const Share& share : shares) counts.push_back(share.part.count);
  return counts;
}

// One collective, shared by the threads that work on it.
struct Work {
  Work(std::unique_ptr<Meeting> meeting, const Message& message)
      : meeting(std::move(meeting)),
        kernel(fold_kernels().of(message.op, message.dtype)),
        element_bytes(element_size(message.dtype)),
        shares(shares_of(message, num_ranks())),
        schedule(counts_of(shares), kChunkBytes / element_bytes) {
    const auto& participants = this->meeting->participants;
    for (size_t operand = 0; operand < message.counts.size(); ++operand) {
      for (int i = 0; i < 2 * num_ranks(); ++i) {
        const Participant& participant = *participants[i % num_ranks()];
        inputs.push_back(participant.inputs[operand]);
        if (i < num_ranks()) outputs.push_back(participant.outputs[operand]);
      }
    }
    for (const Share& share : shares) {
      const size_t bytes = share.part.count * element_bytes;
      bytes_read += share.part.sources.count * bytes;
      bytes_written += (share.part.zeros_elsewhere ? num_ranks() : share.part.receivers.count) * bytes;
    }
  }

  // Whether results are better written around the caches. Not where they overwrite the inputs, whose lines have just
  // been read; and only whole lines can be.
  bool past_cache(const void* const* inputs, const Outputs& out) const {
    if (bytes_written <= kPastCacheBytes) return false;
    for (int i = 0; i < out.count; ++i) {
      const auto address = reinterpret_cast<uintptr_t>(out.buffers[i]) + out.begin * element_bytes;
      if (out.buffers[i] == inputs[i] || address % kCacheLine != 0) return false;
    }
    return true;
  }

  void carry_out(const Chunk& chunk) const {
    const auto& [operand, part] = shares[chunk.part];
    const void* const* operands = &inputs[operand * 2 * num_ranks()];
    void* const* results = &outputs[operand * num_ranks()];
    const Ranks& receivers = part.receivers;
    const Inputs in{operands + part.sources.first, part.sources.count, part.from + chunk.begin};
    const Outputs out{results + receivers.first, receivers.count, part.to + chunk.begin};
    kernel(in, out, chunk.count, past_cache(operands + receivers.first, out));
    if (!part.zeros_elsewhere) return;
    // After the fold, which may have read the same places.
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (rank >= receivers.first && rank < receivers.first + receivers.count) continue;
      std::memset(static_cast<char*>(results[rank]) + out.begin * element_bytes, 0, chunk.count * element_bytes);
    }
  }

  int num_ranks() const { return static_cast<int>(meeting->participants.size()); }

  // Takes chunks until none is left. True if this thread was the one to end the last.
  bool run() {
    size_t done = 0;
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for (size_t index; (index = next_chunk.fetch_add(1, std::memory_order_relaxed)) < schedule.size(); ++done) {
        carry_out(schedule[index]);
      }
    }
    // The release pairs with the acquire of whoever comes last, so that all results are visible to all ranks.
    return done > 0 && chunks_done.fetch_add(done, std::memory_order_acq_rel) + done == schedule.size();
  }

  std::unique_ptr<Meeting> meeting;
  FoldKernel kernel;
  size_t element_bytes;
  std::vector<Share> shares;
  ChunkSchedule schedule;
  std::vector<const void*> inputs;  // by operand, then rank, the ranks twice: a fold may begin with any of them
  std::vector<void*> outputs;       // by operand, then rank
  size_t bytes_read = 0;            // over all ranks
  size_t bytes_written = 0;
  std::atomic<size_t> next_chunk{0};
  std::atomic<size_t> chunks_done{0};
};

}  // namespace

void run_collective(std::unique_ptr<Meeting> meeting, const Message& message, Workers& workers) noexcept {
  auto work = std::make_shared<Work>(std::move(meeting), message);
  if (work->bytes_read + work->bytes_written >= kParallelBytes) {
    const size_t threads = std::min<size_t>(std::max(workers.num_threads(), 1), work->schedule.size());
    for (size_t helper = 1; helper < threads; ++helper) {
      workers.schedule([work] {
        if (work->run()) Relay::instance().tell(std::move(work->meeting));
      });
    }
  }
  if (work->run() || work->schedule.size() == 0) Relay::instance().tell(std::move(work->meeting));
}

}  // namespace jax_ring::cpu
