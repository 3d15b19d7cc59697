// engine.cc: splits a collective over threads that take chunks as they become free.
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
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

// Calls visit(share) for all parts of all operands.
template <class Visit>
void for_each_share(const Message& message, int num_ranks, Visit visit) {
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    for (int i = 0; i < num_parts(message.plan, num_ranks); ++i) {
      visit(Share{operand, part_of(message.plan, num_ranks, message.counts[operand], element_size(message.dtype), i)});
    }
  }
}

// What a collective moves, over all ranks.
struct Traffic {
  size_t bytes_read = 0;
  size_t bytes_written = 0;
};

Traffic traffic_of(const Message& message, int num_ranks) {
  Traffic traffic;
  for_each_share(message, num_ranks, [&](const Share& share) {
    const size_t bytes = share.part.count * element_size(message.dtype);
    traffic.bytes_read += share.part.sources.count * bytes;
    traffic.bytes_written += (share.part.zeros_elsewhere ? num_ranks : share.part.receivers.count) * bytes;
  });
  return traffic;
}

// What the chunks of a collective have in common.
struct Work {
  MeetingPtr meeting;
  FoldKernel kernel;
  size_t element_bytes;
  bool past_caches;  // where the results allow it

  // Elements [begin, begin + count) of a part.
  void carry_out(const Share& share, size_t begin, size_t count) const {
    const int num_ranks = meeting->num_ranks();
    const void* const* operands = &meeting->inputs[share.operand * 2 * num_ranks];
    void* const* results = &meeting->outputs[share.operand * num_ranks];
    const auto& [sources, from, receivers, to, whole_count, zeros_elsewhere] = share.part;
    const Inputs in{operands + sources.first, sources.count, from + begin};
    const Outputs out{results + receivers.first, receivers.count, to + begin};
    kernel(in, out, count, past_caches && can_go_past_caches(operands + receivers.first, out));
    if (!zeros_elsewhere || count == 0) return;  // memset takes no null, which empty buffers may be at
    // After the fold, which may have read the same places.
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rank >= receivers.first && rank < receivers.first + receivers.count) continue;
      std::memset(static_cast<char*>(results[rank]) + out.begin * element_bytes, 0, count * element_bytes);
    }
  }

  // Whether results can be written around the caches, and should be. Not where they overwrite the inputs, whose lines
  // have just been read; and only whole lines can be.
  bool can_go_past_caches(const void* const* inputs, const Outputs& out) const {
    for (int i = 0; i < out.count; ++i) {
      const auto address = reinterpret_cast<uintptr_t>(out.buffers[i]) + out.begin * element_bytes;
      if (out.buffers[i] == inputs[i] || address % kCacheLine != 0) return false;
    }
    return true;
  }
};

// Work that is shared by several threads.
struct SharedWork {
  SharedWork(Work work, const Message& message)
      : work(std::move(work)),
        shares(shares_of(message, this->work.meeting->num_ranks())),
        schedule(counts_of(shares), kChunkBytes / this->work.element_bytes) {}

  // Takes chunks until none is left. True if this thread was the one to end the last.
  bool run() {
    size_t done = 0;
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for (size_t index; (index = next_chunk.fetch_add(1, std::memory_order_relaxed)) < schedule.size(); ++done) {
        const Chunk chunk = schedule[index];
        work.carry_out(shares[chunk.part], chunk.begin, chunk.count);
      }
    }
    // The release pairs with the acquire of whoever comes last, so that all results are visible to all ranks.
    return done > 0 && chunks_done.fetch_add(done, std::memory_order_acq_rel) + done == schedule.size();
  }

  static std::vector<Share> shares_of(const Message& message, int num_ranks) {
    std::vector<Share> shares;
    for_each_share(message, num_ranks, [&](const Share& share) { shares.push_back(share); });
    return shares;
  }

  static std::vector<size_t> counts_of(const std::vector<Share>& shares) {
    std::vector<size_t> counts;
    for (const Share& share : shares) counts.push_back(share.part.count);
    return counts;
  }

  Work work;
  std::vector<Share> shares;
  ChunkSchedule schedule;
  std::atomic<size_t> next_chunk{0};
  std::atomic<size_t> chunks_done{0};
};

}  // namespace

void run_collective(MeetingPtr meeting, const Message& message, Workers& workers) noexcept {
  const int num_ranks = meeting->num_ranks();
  const Traffic traffic = traffic_of(message, num_ranks);
  Work work{std::move(meeting), fold_kernels().of(message.op, message.dtype), element_size(message.dtype),
            traffic.bytes_written > kPastCacheBytes};
  if (traffic.bytes_read + traffic.bytes_written < kParallelBytes) {
    // On this thread alone, without the bookkeeping of work that is shared.
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for_each_share(message, num_ranks, [&](const Share& share) { work.carry_out(share, 0, share.part.count); });
    }
    return Relay::instance().tell(std::move(work.meeting));
  }
  auto shared = std::make_shared<SharedWork>(std::move(work), message);
  const size_t threads = std::min<size_t>(std::max(workers.num_threads(), 1), shared->schedule.size());
  for (size_t helper = 1; helper < threads; ++helper) {
    workers.schedule([shared] {
      if (shared->run()) Relay::instance().tell(std::move(shared->work.meeting));
    });
  }
  if (shared->run()) Relay::instance().tell(std::move(shared->work.meeting));
}

}  // namespace jax_ring::cpu
