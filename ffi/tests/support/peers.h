// peers.h: a group of ranks in one process that runs the GPU kernels' code, on one or several threads per team.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "device/algorithm.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {

// Small, so that little data uses every part of a mailbox many times.
// Teams are independent, and many threads on few cores make the tests slow: two teams only where ranks are few.
inline Capacity small_capacity(int num_ranks) {
  Capacity capacity{};
  capacity.num_ranks = num_ranks;
  capacity.num_ctas = num_ranks <= 4 ? 2 : 1;
  capacity.one_shot_packs = 3;
  capacity.part_packs = 5;
  capacity.slot_packs = 8;
  capacity.num_slots = 4;
  return capacity;
}

// A thread of a team that delays randomly wherever it could interact with another thread or rank.
class JitteryTeam : public HostTeam {
 public:
  explicit JitteryTeam(std::minstd_rand& random, HostTeam team = {}) : HostTeam(team), random_(&random) {}
  void sync() const { all(true); }
  bool all(bool mine) const {
    random_delay();
    const bool result = HostTeam::all(mine);
    random_delay();
    return result;
  }

 private:
  void random_delay() const {
    const unsigned dice = (*random_)() % 8;
    if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds((*random_)() % 200));
    if (dice < 4) std::this_thread::yield();
  }
  std::minstd_rand* random_;
};

// One call: each rank's operands and results.
struct PeerCall {
  DType dtype;
  Op op;
  Algorithm algorithm;
  Plan plan;
  uint32_t fingerprint;
  std::vector<size_t> counts;                      // elements of each operand
  std::vector<std::vector<OffsetBuffer>> inputs;   // by rank, then operand
  std::vector<std::vector<OffsetBuffer>> outputs;  // likewise
  bool in_place = false;
  std::optional<TreeProgram> tree = {};  // with Order::tree: each operand has its slots, one after the other

  // Operands of these sizes with random elements, `offset` bytes off their natural alignment.
  static PeerCall random(DType dtype, Algorithm algorithm, Plan plan, int num_ranks, std::vector<size_t> counts,
                         unsigned seed, size_t offset = 0, Op op = Op::sum) {
    PeerCall call{dtype, op, algorithm, plan, seed + 1, std::move(counts), {}, {}};
    call.inputs.resize(num_ranks);
    call.outputs.resize(num_ranks);
    for (size_t i = 0; i < call.counts.size(); ++i) {
      const auto elements = random_elements(dtype, num_ranks, call.counts[i], seed + 17 * static_cast<unsigned>(i));
      const size_t result_bytes = result_count(plan, num_ranks, call.counts[i]) * element_size(dtype);
      for (int rank = 0; rank < num_ranks; ++rank) {
        call.inputs[rank].emplace_back(elements[rank], offset);
        call.outputs[rank].emplace_back(Bytes(result_bytes, 0xa5), offset);
      }
    }
    return call;
  }

  int num_ranks() const { return static_cast<int>(inputs.size()); }

  Message message(int rank) {
    Message message{};
    message.fingerprint = fingerprint;
    message.num_operands = static_cast<uint32_t>(counts.size());
    message.route = route_of(plan, num_ranks(), rank);
    message.flipped = kernel_fold(dtype, op).flipped;
    message.num_blocks = num_blocks(plan, num_ranks(), tree ? tree->num_slots : 1);
    const uint64_t blocks = num_input_blocks(plan, num_ranks()) * (tree ? tree->num_slots : 1);
    for (size_t i = 0; i < counts.size(); ++i) {
      OffsetBuffer& input = inputs[rank][i];
      OffsetBuffer& output = in_place ? input : outputs[rank][i];
      message.operands[i] = {input.data(), output.data(), input.size() / blocks, message.num_packs};
      message.num_packs += ceil_div(input.size() / blocks, kPackBytes);
    }
    return message;
  }

  // The expected results by rank and operand, from the definitions.
  std::vector<std::vector<Bytes>> expected() {
    std::vector<std::vector<Bytes>> results(num_ranks());
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (size_t operand = 0; operand < counts.size(); ++operand) {
        const size_t count = result_count(plan, num_ranks(), counts[operand]);
        Bytes result(count * element_size(dtype));
        std::vector<uint64_t> values;
        for (size_t i = 0; i < count; ++i) {
          const auto from = origin(plan, num_ranks(), counts[operand], element_size(dtype), rank, i);
          if (!from) continue;
          values.clear();
          for (int source = from->first; source < from->first + from->num_sources; ++source) {
            values.push_back(element_bits(dtype, inputs[source % num_ranks()][operand].data(), from->index));
          }
          // A single value is moved, not folded.
          set_element(dtype, result.data(), i, values.size() == 1 ? values[0] : scalar_fold(dtype, values, op));
        }
        results[rank].push_back(std::move(result));
      }
    }
    return results;
  }
};

using TeamFunction = void (*)(const Endpoint&, const Message&, const Plan&, int cta, JitteryTeam team);

// The code for an element type, an operation and an algorithm, as in the GPU's table of kernels.
TeamFunction team_function(DType dtype, Op op, Algorithm algorithm);

// The code for a sum along a tree.
using TreeFunction = void (*)(const Endpoint&, const Message&, const Plan&, int cta, JitteryTeam team,
                              const TreeProgram& tree);
TreeFunction tree_function(DType dtype, Algorithm algorithm);

// The ranks' mailboxes and their state.
class Peers {
 public:
  // first: the initial value of all counters. They wrap around eventually, which a test cannot wait for.
  // threads: of each team.
  explicit Peers(Capacity capacity, uint32_t first = 0, int threads = 1)
      : capacity_(capacity),
        threads_(threads),
        mailboxes_(capacity.num_ranks, Bytes(capacity.bytes())),
        progress_(capacity.num_ranks, std::vector<Progress>(capacity.num_ctas, Progress{first, first, first, first})),
        failed_(capacity.num_ranks),
        failures_(capacity.num_ranks) {
    for (Bytes& mailbox : mailboxes_) {
      for (size_t at = 0; at < capacity.flags_bytes(); at += kFlagBytes) {
        const uint64_t flag = flag_value(0, first);
        std::memcpy(mailbox.data() + at, &flag, sizeof(flag));
      }
    }
  }

  Endpoint endpoint(int rank, double deadline_seconds = 60) {
    Endpoint self{};
    self.capacity = capacity_;
    self.rank = rank;
    self.call = 7;
    for (int peer = 0; peer < capacity_.num_ranks; ++peer) self.mailbox[peer] = mailboxes_[peer].data();
    self.progress = progress_[rank].data();
    self.failed = &failed_[rank];
    self.failure = &failures_[rank];
    self.deadline_ns = static_cast<uint64_t>(deadline_seconds * 1e9);
    return self;
  }

  // Each team of each of these ranks makes the calls one after the other, without a barrier between them.
  void run(std::vector<PeerCall>& calls, const std::vector<int>& ranks, double deadline_seconds = 60) {
    std::vector<std::thread> threads;
    std::deque<HostBarrier> barriers;
    for (int rank : ranks) {
      for (int cta = 0; cta < capacity_.num_ctas; ++cta) {
        HostBarrier* barrier = threads_ == 1 ? nullptr : &barriers.emplace_back(threads_);
        for (int thread = 0; thread < threads_; ++thread) {
          threads.emplace_back([&, rank, cta, barrier, thread] {
            const Endpoint self = endpoint(rank, deadline_seconds);
            std::minstd_rand random(static_cast<unsigned>(1000 * rank + 10 * cta + thread + 1));
            const JitteryTeam team(random, {barrier, thread});
            for (PeerCall& call : calls) {
              const Message message = call.message(rank);
              if (call.tree) {
                tree_function(call.dtype, call.algorithm)(self, message, call.plan, cta, team, *call.tree);
              } else {
                const KernelFold fold = kernel_fold(call.dtype, call.op);
                team_function(fold.dtype, fold.op, call.algorithm)(self, message, call.plan, cta, team);
              }
              team.sync();  // the end of a kernel
            }
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
  }

  void run(std::vector<PeerCall>& calls) {
    std::vector<int> ranks(capacity_.num_ranks);
    for (int rank = 0; rank < capacity_.num_ranks; ++rank) ranks[rank] = rank;
    run(calls, ranks);
  }

  const Failure& failure(int rank) const { return failures_[rank]; }
  const Bytes& mailbox(int rank) const { return mailboxes_[rank]; }
  const Progress& progress(int rank, int cta) const { return progress_[rank][cta]; }

 private:
  Capacity capacity_;
  int threads_;
  std::vector<Bytes> mailboxes_;
  std::vector<std::vector<Progress>> progress_;
  std::vector<uint32_t> failed_;
  std::vector<Failure> failures_;
};

// Compares every rank's results with the definition.
inline void expect_results(PeerCall& call, const std::vector<std::vector<Bytes>>& expected) {
  for (int rank = 0; rank < call.num_ranks(); ++rank) {
    for (size_t i = 0; i < call.counts.size(); ++i) {
      OffsetBuffer& got = call.in_place ? call.inputs[rank][i] : call.outputs[rank][i];
      const Bytes& want = expected[rank][i];
      const auto difference =
          first_difference(call.dtype, got.data(), want.data(), want.size() / element_size(call.dtype));
      ASSERT_FALSE(difference.has_value())
          << name_of(call.dtype) << ", collective " << static_cast<int>(call.plan.collective) << ", algorithm "
          << static_cast<int>(call.algorithm) << ", order " << static_cast<int>(call.plan.order) << ", rank " << rank
          << " of " << call.num_ranks() << ", operand " << i << " of " << call.counts[i]
          << " elements: the first wrong one is " << *difference;
    }
  }
}

}  // namespace jax_ring::cpu::testing
