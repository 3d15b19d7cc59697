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

// One reduction, shared by the threads that work on it.
struct Work {
  Work(std::unique_ptr<Meeting> meeting, Message message)
      : meeting(std::move(meeting)),
        kernel(fold_kernels().sum[static_cast<int>(message.dtype)]),
        schedule(std::move(message.counts), kChunkBytes / element_size(message.dtype)) {
    const auto& participants = this->meeting->participants;
    const size_t num_operands = participants.front()->inputs.size();
    for (size_t operand = 0; operand < num_operands; ++operand) {
      for (const auto& participant : participants) {
        inputs.push_back(participant->inputs[operand]);
        outputs.push_back(participant->outputs[operand]);
      }
    }
    bytes = schedule.num_elements() * element_size(message.dtype) * num_ranks();
  }

  // Whether an operand's results are better written around the caches. Not where they overwrite the inputs, whose lines
  // have just been read; and only whole lines can be.
  bool past_cache(size_t row) const {
    if (bytes <= kPastCacheBytes) return false;
    for (size_t i = row; i < row + num_ranks(); ++i) {
      if (outputs[i] == inputs[i] || reinterpret_cast<uintptr_t>(outputs[i]) % kCacheLine != 0) return false;
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
        const size_t row = chunk.operand * num_ranks();
        kernel(&inputs[row], &outputs[row], num_ranks(), chunk.begin, chunk.count, past_cache(row));
      }
    }
    // The release pairs with the acquire of whoever comes last, so that all results are visible to all ranks.
    return done > 0 && chunks_done.fetch_add(done, std::memory_order_acq_rel) + done == schedule.size();
  }

  std::unique_ptr<Meeting> meeting;
  FoldKernel kernel;
  ChunkSchedule schedule;
  std::vector<const void*> inputs;  // by operand, then rank
  std::vector<void*> outputs;
  size_t bytes = 0;  // of all ranks' results
  std::atomic<size_t> next_chunk{0};
  std::atomic<size_t> chunks_done{0};
};

}  // namespace

void all_reduce(std::unique_ptr<Meeting> meeting, Message message, Workers& workers) noexcept {
  auto work = std::make_shared<Work>(std::move(meeting), std::move(message));
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
