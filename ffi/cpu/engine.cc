// engine.cc: splits the fold over threads that take chunks as they become free.
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
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

// Elements of an operand that are folded in the same order of ranks: from first_rank on, around the ring.
struct Part {
  size_t operand;
  Range range;
  int first_rank;
};

std::vector<Part> parts_of(const Message& message, int num_ranks) {
  std::vector<Part> parts;
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    const size_t count = message.counts[operand];
    if (message.order == Order::rank) {
      parts.push_back({operand, {0, count}, 0});
      continue;
    }
    for (int i = 0; i < num_ranks; ++i) {
      const Range block = ring_block(count, element_size(message.dtype), num_ranks, i);
      parts.push_back({operand, block, ring_first_rank(num_ranks, i)});
    }
  }
  return parts;
}

std::vector<size_t> counts_of(const std::vector<Part>& parts) {
  std::vector<size_t> counts;
  for (const Part& part : parts) counts.push_back(part.range.count);
  return counts;
}

// One reduction, shared by the threads that work on it.
struct Work {
  Work(std::unique_ptr<Meeting> meeting, const Message& message)
      : meeting(std::move(meeting)),
        kernel(fold_kernels().sum[static_cast<int>(message.dtype)]),
        element_bytes(element_size(message.dtype)),
        parts(parts_of(message, num_ranks())),
        schedule(counts_of(parts), kChunkBytes / element_bytes) {
    const auto& participants = this->meeting->participants;
    for (size_t operand = 0; operand < message.counts.size(); ++operand) {
      for (int i = 0; i < 2 * num_ranks(); ++i) {
        const Participant& participant = *participants[i % num_ranks()];
        inputs.push_back(participant.inputs[operand]);
        if (i < num_ranks()) outputs.push_back(participant.outputs[operand]);
      }
    }
    bytes = schedule.num_elements() * element_bytes * num_ranks();
  }

  // Whether an operand's results are better written around the caches. Not where they overwrite the inputs, whose lines
  // have just been read; and only whole lines can be.
  bool past_cache(const void* const* in, void* const* out, size_t begin) const {
    if (bytes <= kPastCacheBytes) return false;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const auto address = reinterpret_cast<uintptr_t>(out[rank]) + begin * element_bytes;
      if (out[rank] == in[rank] || address % kCacheLine != 0) return false;
    }
    return true;
  }

  int num_ranks() const { return static_cast<int>(meeting->participants.size()); }

  // Folds chunks until none is left. True if this thread was the one to fold the last.
  bool run() {
    size_t done = 0;
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for (size_t index; (index = next_chunk.fetch_add(1, std::memory_order_relaxed)) < schedule.size(); ++done) {
        const Chunk chunk = schedule[index];
        const Part& part = parts[chunk.part];
        const void* const* in = &inputs[part.operand * 2 * num_ranks()];
        void* const* out = &outputs[part.operand * num_ranks()];
        const size_t begin = part.range.begin + chunk.begin;
        kernel(in + part.first_rank, out, num_ranks(), begin, chunk.count, past_cache(in, out, begin));
      }
    }
    // The release pairs with the acquire of whoever comes last, so that all results are visible to all ranks.
    return done > 0 && chunks_done.fetch_add(done, std::memory_order_acq_rel) + done == schedule.size();
  }

  std::unique_ptr<Meeting> meeting;
  FoldKernel kernel;
  size_t element_bytes;
  std::vector<Part> parts;
  ChunkSchedule schedule;
  std::vector<const void*> inputs;  // by operand, then rank, the ranks twice: a fold may begin with any of them
  std::vector<void*> outputs;       // by operand, then rank
  size_t bytes = 0;                 // of all ranks' results
  std::atomic<size_t> next_chunk{0};
  std::atomic<size_t> chunks_done{0};
};

}  // namespace

void all_reduce(std::unique_ptr<Meeting> meeting, const Message& message, Workers& workers) noexcept {
  auto work = std::make_shared<Work>(std::move(meeting), message);
  if (2 * work->bytes >= kParallelBytes) {
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
