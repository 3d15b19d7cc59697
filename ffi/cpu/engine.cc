// engine.cc: splits the fold over threads that take chunks as they become free.
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
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

FoldKernel kernel_of(const Message& message) { return fold_kernels().sum[static_cast<int>(message.dtype)]; }

void fold(const Meeting& meeting, FoldKernel kernel, const Chunk& chunk, bool past_cache) {
  const size_t row = chunk.operand * meeting.num_ranks();
  kernel(&meeting.inputs[row], &meeting.outputs[row], meeting.num_ranks(), chunk.begin, chunk.count, past_cache);
}

// The whole reduction on this thread, without the bookkeeping of one that is shared.
void fold_alone(const Meeting& meeting, const Message& message) {
  const ScopedFloatMode exact(FloatMode::ieee());
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    fold(meeting, kernel_of(message), {operand, 0, message.counts[operand]}, false);
  }
}

// One reduction, shared by the threads that work on it.
struct Work {
  Work(MeetingPtr meeting, const Message& message, size_t bytes)
      : meeting(std::move(meeting)),
        kernel(kernel_of(message)),
        schedule(message.counts, kChunkBytes / element_size(message.dtype)),
        bytes(bytes) {}

  // Whether an operand's results are better written around the caches. Not where they overwrite the inputs, whose lines
  // have just been read; and only whole lines can be.
  bool past_cache(size_t operand) const {
    if (bytes <= kPastCacheBytes) return false;
    for (size_t i = operand * meeting->num_ranks(); i < (operand + 1) * meeting->num_ranks(); ++i) {
      const void* output = meeting->outputs[i];
      if (output == meeting->inputs[i] || reinterpret_cast<uintptr_t>(output) % kCacheLine != 0) return false;
    }
    return true;
  }

  // Folds chunks until none is left. True if this thread was the one to fold the last.
  bool run() {
    size_t done = 0;
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for (size_t index; (index = next_chunk.fetch_add(1, std::memory_order_relaxed)) < schedule.size(); ++done) {
        const Chunk chunk = schedule[index];
        fold(*meeting, kernel, chunk, past_cache(chunk.operand));
      }
    }
    // The release pairs with the acquire of whoever comes last, so that all results are visible to all ranks.
    return done > 0 && chunks_done.fetch_add(done, std::memory_order_acq_rel) + done == schedule.size();
  }

  MeetingPtr meeting;
  FoldKernel kernel;
  ChunkSchedule schedule;
  size_t bytes;  // of all ranks' results
  std::atomic<size_t> next_chunk{0};
  std::atomic<size_t> chunks_done{0};
};

}  // namespace

void all_reduce(MeetingPtr meeting, const Message& message, Workers& workers) noexcept {
  const size_t num_elements = std::accumulate(message.counts.begin(), message.counts.end(), size_t{0});
  const size_t bytes = num_elements * element_size(message.dtype) * meeting->num_ranks();
  if (2 * bytes < kParallelBytes) {
    fold_alone(*meeting, message);
    Relay::instance().tell(std::move(meeting));
    return;
  }
  auto work = std::make_shared<Work>(std::move(meeting), message, bytes);
  const size_t threads = std::min<size_t>(std::max(workers.num_threads(), 1), work->schedule.size());
  for (size_t helper = 1; helper < threads; ++helper) {
    workers.schedule([work] {
      if (work->run()) Relay::instance().tell(std::move(work->meeting));
    });
  }
  if (work->run()) Relay::instance().tell(std::move(work->meeting));
}

}  // namespace jax_ring::cpu
