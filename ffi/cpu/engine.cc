// engine.cc: splits a collective into chunks. Threads of a pool take them as they become free.
#include "cpu/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "collective/blocks.h"
#include "cpu/fold/float_mode.h"
#include "cpu/rendezvous/completion_threads.h"

namespace jax_ring::cpu {
namespace {

constexpr size_t kCacheLine = 64;
// Bytes of one rank's operand: many compared with the cost of taking a chunk, few compared with the message.
constexpr size_t kChunkBytes = 128 << 10;
// Below this many bytes read and written, waking another thread costs more than it saves.
constexpr size_t kParallelBytes = 2 << 20;
// These limits for ranks that wait in their calls, and so are awake already.
constexpr size_t kAwakeParallelBytes = 512 << 10;
constexpr size_t kAwakeChunkBytes = 64 << 10;
// Above this many bytes, over all ranks, results would evict each other from the caches. Write them with streaming
// stores.
constexpr size_t kStreamingBytes = 4 << 20;

// One part of one operand.
struct OperandPart {
  size_t operand, result;
  Part part;
  const Subtree* subtrees;  // of the fold along a tree, or null
};

// Calls visit(operand_part) for all parts of all operands.
template <class Visit>
void for_each_part(const Message& message, int num_ranks, Visit visit) {
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    if (message.blocks_apart) {
      const int receiver = static_cast<int>(operand);
      for (int source = 0; source < num_ranks; ++source) {
        const Part part = {{source, 1}, 0, {receiver, 1}, 0, message.counts[operand]};
        visit(OperandPart{operand, static_cast<size_t>(source), part, nullptr});
      }
      continue;
    }
    const int num = num_parts(message.plan, num_ranks, message.tree, message.num_results);
    for (int i = 0; i < num; ++i) {
      const Part part = part_of(message.plan, num_ranks, message.tree, message.num_results, message.counts[operand],
                                element_size(message.dtype), i);
      const bool along_tree = folds_along_tree(message.plan);
      visit(OperandPart{operand, operand, part, along_tree ? message.tree->subtrees(part.sources.first) : nullptr});
    }
  }
}

// The addresses of a tree's terms. If every rank has one term they are the operands' addresses.
void find_terms(const Message& message, Rendezvous& rendezvous) {
  if (!folds_along_tree(message.plan) || message.tree->num_slots() == 1) return;
  for (size_t operand = 0; operand < message.counts.size(); ++operand) {
    const void* const* operands = &rendezvous.inputs[operand * 2 * rendezvous.num_ranks()];
    const size_t slot_bytes = message.counts[operand] * element_size(message.dtype);
    for (const TreeTerm& term : message.tree->terms()) {
      // An empty operand is null: do not add to it.
      const void* const slot = slot_bytes == 0
                                   ? operands[term.member]
                                   : static_cast<const char*>(operands[term.member]) + term.slot * slot_bytes;
      rendezvous.terms.push_back(slot);
    }
  }
}

// Bytes that a collective reads and writes, over all ranks.
struct Traffic {
  size_t bytes_read = 0;
  size_t bytes_written = 0;
};

Traffic traffic_of(const Message& message, int num_ranks) {
  Traffic traffic;
  for_each_part(message, num_ranks, [&](const OperandPart& operand_part) {
    const Part& part = operand_part.part;
    traffic.bytes_read += part.sources.count * part.count * message.operand_element_bytes();
    traffic.bytes_written +=
        (part.zeros_elsewhere ? num_ranks : part.receivers.count) * part.count * message.result_element_bytes();
  });
  return traffic;
}

// Shared by the chunks of a collective.
struct Work {
  RendezvousPtr rendezvous;
  FoldKernel kernel;
  size_t element_bytes;  // of the results
  size_t num_terms;      // of each operand, see find_terms()
  bool streaming;        // if the buffers allow it: see can_stream()

  // Executes elements [begin, begin + count) of a part.
  void execute(const OperandPart& operand_part, size_t begin, size_t count) const {
    const int num_ranks = rendezvous->num_ranks();
    const void* const* operands = &rendezvous->inputs[operand_part.operand * 2 * num_ranks];
    void* const* results = &rendezvous->outputs[operand_part.result * num_ranks];
    const auto& [sources, from, receivers, to, whole_count, zeros_elsewhere] = operand_part.part;
    const void* const* terms =
        rendezvous->terms.empty() ? operands : &rendezvous->terms[operand_part.operand * num_terms];
    const Inputs in{terms + sources.first, sources.count, from + begin, operand_part.subtrees};
    const Outputs out{results + receivers.first, receivers.count, to + begin};
    if (sources.count > 0) {
      kernel(in, out, count, streaming && can_stream(operands + receivers.first, out));
    }
    const bool zeros = zeros_elsewhere || sources.count == 0;
    if (!zeros || count == 0) return;  // empty buffers may be null, which memset does not allow
    // Write zeros after the fold, which may have read the same memory.
    for (int rank = 0; rank < num_ranks; ++rank) {
      const bool receives = rank >= receivers.first && rank < receivers.first + receivers.count;
      if (receives == (sources.count > 0)) continue;
      std::memset(static_cast<char*>(results[rank]) + out.begin * element_bytes, 0, count * element_bytes);
    }
  }

  // Whether streaming stores are possible and worthwhile. They need whole cache lines, and do not pay where results
  // overwrite inputs: reading these has just put their lines into the cache.
  bool can_stream(const void* const* inputs, const Outputs& out) const {
    for (int i = 0; i < out.count; ++i) {
      const auto address = reinterpret_cast<uintptr_t>(out.buffers[i]) + out.begin * element_bytes;
      if (out.buffers[i] == inputs[i] || address % kCacheLine != 0) return false;
    }
    return true;
  }
};

// The work of one call, shared by the leading thread and its helpers.
class SharedWork : public std::enable_shared_from_this<SharedWork> {
 public:
  SharedWork(Work work, const Message& message, size_t chunk_bytes)
      : work_(std::move(work)),
        parts_(parts_of(message, work_.rendezvous->num_ranks())),
        schedule_(counts_of(parts_), chunk_bytes / work_.element_bytes) {}

  // Asks waiting ranks for help, then the pool's threads if these are too few, and takes part.
  void lead(Workers& workers) {
    const auto help = [shared = shared_from_this()] { shared->run(); };
    size_t threads = 0;
    for (const WaitingRankPtr& rank : work_.rendezvous->waiting) threads += rank != nullptr && rank->offer(help);
    // This thread's rank may be among them.
    threads = std::max<size_t>(threads, 1);
    const size_t useful = std::min<size_t>(std::max(workers.num_threads(), 1), schedule_.size());
    for (; threads < useful; ++threads) workers.schedule(help);
    finish(kAsking);
    run();
  }

 private:
  // Counts as a chunk: ranks must not go on, and reuse what they wait with, before all have been asked.
  static constexpr size_t kAsking = 1;

  // Takes chunks until none is left.
  void run() {
    size_t done = 0;
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for (size_t index; (index = next_chunk_.fetch_add(1, std::memory_order_relaxed)) < schedule_.size(); ++done) {
        const Chunk chunk = schedule_[index];
        work_.execute(parts_[chunk.part], chunk.begin, chunk.count);
      }
    }
    if (done > 0) finish(done);
  }

  // The thread that finishes the last chunk completes the call.
  void finish(size_t done) {
    // acq_rel: the release publishes this thread's results, the acquire makes all results visible to the last thread.
    if (done_.fetch_add(done, std::memory_order_acq_rel) + done < schedule_.size() + kAsking) return;
    CompletionThreads::instance().complete(std::move(work_.rendezvous));
  }

  static std::vector<OperandPart> parts_of(const Message& message, int num_ranks) {
    std::vector<OperandPart> parts;
    for_each_part(message, num_ranks, [&](const OperandPart& operand_part) { parts.push_back(operand_part); });
    return parts;
  }

  static std::vector<size_t> counts_of(const std::vector<OperandPart>& parts) {
    std::vector<size_t> counts;
    for (const OperandPart& operand_part : parts) counts.push_back(operand_part.part.count);
    return counts;
  }

  Work work_;
  std::vector<OperandPart> parts_;
  ChunkSchedule schedule_;
  std::atomic<size_t> next_chunk_{0};
  std::atomic<size_t> done_{0};
};

// The calling thread does all the work of a collective.
class NoWorkers final : public Workers {
 public:
  int num_threads() const override { return 1; }
  void schedule(std::function<void()> /*task*/) override {}
};

}  // namespace

void run_collective(RendezvousPtr rendezvous, const Message& message, Workers& workers) noexcept {
  const int num_ranks = rendezvous->num_ranks();
  const Traffic traffic = traffic_of(message, num_ranks);
  find_terms(message, *rendezvous);
  const FoldKernel converting = message.conversion.kernel;
  const FoldKernel kernel = converting != nullptr ? converting : fold_kernels().get(message.op, message.dtype);
  Work work{std::move(rendezvous), kernel, message.result_element_bytes(),
            message.tree != nullptr ? message.tree->terms().size() : 0, traffic.bytes_written > kStreamingBytes};
  const auto& waiting = work.rendezvous->waiting;
  // One of them may be this thread's rank.
  const bool others_wait = std::count_if(waiting.begin(), waiting.end(), [](const WaitingRankPtr& rank) {
                             return rank != nullptr && rank->is_waiting();
                           }) > 1;
  if (traffic.bytes_read + traffic.bytes_written < (others_wait ? kAwakeParallelBytes : kParallelBytes)) {
    // On this thread alone, without the bookkeeping of shared work.
    {
      const ScopedFloatMode exact(FloatMode::ieee());
      for_each_part(message, num_ranks,
                    [&](const OperandPart& operand_part) { work.execute(operand_part, 0, operand_part.part.count); });
    }
    return CompletionThreads::instance().complete(std::move(work.rendezvous));
  }
  const size_t chunk_bytes = others_wait ? kAwakeChunkBytes : kChunkBytes;
  std::make_shared<SharedWork>(std::move(work), message, chunk_bytes)->lead(workers);
}

void run_collective_beside(RendezvousPtr rendezvous, const Message& message) noexcept {
  struct Task {
    RendezvousPtr rendezvous;
    Message message;
  };
  auto task = std::make_unique<Task>(Task{std::move(rendezvous), message});
  auto alone = std::make_unique<Rendezvous>();
  alone->done.emplace_back([task = std::move(task)](const CallFailure* /*failure*/) {
    NoWorkers workers;
    run_collective(std::move(task->rendezvous), task->message, workers);
  });
  CompletionThreads::instance().complete(RendezvousPtr(alone.release()));
}

}  // namespace jax_ring::cpu
