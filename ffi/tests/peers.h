// peers.h: a group of ranks in one process, a thread for each team of each rank, that runs the code of the GPU's
// kernels.
#pragma once

#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ring/algorithm.h"
#include "support.h"

namespace jax_ring::cpu::testing {

// Small, so that little data goes through every part of a mailbox many times.
// Teams do not know of each other, and many threads on few cores make the tests slow: two teams where ranks are few.
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

// A team of one thread that dawdles at every place where it could meet another rank.
class Dawdler : public Solo {
 public:
  explicit Dawdler(std::minstd_rand& random) : random_(&random) {}
  void sync() const { dawdle(); }
  bool all(bool mine) const {
    dawdle();
    return mine;
  }

 private:
  void dawdle() const {
    const unsigned dice = (*random_)() % 8;
    if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds((*random_)() % 200));
    if (dice < 4) std::this_thread::yield();
  }
  std::minstd_rand* random_;
};

// One call: what each rank brings, and where its results go.
struct PeerCall {
  DType dtype;
  Algorithm algorithm;
  Order order = Order::rank;
  uint32_t fingerprint = 1;
  std::vector<size_t> counts;                      // elements of each operand
  std::vector<std::vector<OffsetBuffer>> inputs;   // by rank, then operand
  std::vector<std::vector<OffsetBuffer>> outputs;  // the same
  bool in_place = false;

  // Operands of these sizes with random elements, `offset` bytes off their natural alignment.
  static PeerCall random(DType dtype, Algorithm algorithm, Order order, int num_ranks, std::vector<size_t> counts,
                         unsigned seed, size_t offset = 0) {
    PeerCall call{dtype, algorithm, order, seed + 1, std::move(counts), {}, {}};
    call.inputs.resize(num_ranks);
    call.outputs.resize(num_ranks);
    for (size_t i = 0; i < call.counts.size(); ++i) {
      const auto elements = random_elements(dtype, num_ranks, call.counts[i], seed + 17 * static_cast<unsigned>(i));
      for (int rank = 0; rank < num_ranks; ++rank) {
        call.inputs[rank].emplace_back(elements[rank], offset);
        call.outputs[rank].emplace_back(Bytes(elements[rank].size(), 0xa5), offset);
      }
    }
    return call;
  }

  Message message(int rank) {
    Message message{};
    message.fingerprint = fingerprint;
    message.num_operands = static_cast<uint32_t>(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) {
      OffsetBuffer& input = inputs[rank][i];
      OffsetBuffer& output = in_place ? input : outputs[rank][i];
      message.operands[i] = {input.data(), output.data(), input.size(), message.num_packs};
      message.num_packs += ceil_div(input.size(), kPackBytes);
    }
    return message;
  }

  // What every rank must get, from the definition of the orders.
  std::vector<Bytes> expected() {
    const int p = static_cast<int>(inputs.size());
    std::vector<Bytes> results;
    for (size_t operand = 0; operand < counts.size(); ++operand) {
      const size_t per_pack = kPackBytes / element_size(dtype);
      const size_t block = ceil_div(ceil_div(counts[operand], per_pack), p) * per_pack;
      Bytes result(counts[operand] * element_size(dtype));
      std::vector<uint64_t> by_rank(p);
      for (size_t i = 0; i < counts[operand]; ++i) {
        const int first = order == Order::rank ? 0 : static_cast<int>((i / block + 1) % p);
        for (int k = 0; k < p; ++k) by_rank[k] = element_bits(dtype, inputs[(first + k) % p][operand].data(), i);
        set_element(dtype, result.data(), i, scalar_fold(dtype, by_rank));
      }
      results.push_back(std::move(result));
    }
    return results;
  }
};

// Picks the code for an element type and an algorithm, as the table of kernels does on a GPU.
inline void all_reduce_any(DType dtype, Algorithm algorithm, const Endpoint& self, const Message& message, Order order,
                           int cta, Dawdler team) {
  const auto with = [&](auto element) {
    using Element = decltype(element);
    switch (algorithm) {
      case Algorithm::one_shot:
        return all_reduce<Element, Sum, Algorithm::one_shot, Dawdler>(self, message, order, cta, team, Sum{});
      case Algorithm::two_shot:
        return all_reduce<Element, Sum, Algorithm::two_shot, Dawdler>(self, message, order, cta, team, Sum{});
      case Algorithm::ring:
        return all_reduce<Element, Sum, Algorithm::ring, Dawdler>(self, message, order, cta, team, Sum{});
      case Algorithm::count:
        break;
    }
  };
  switch (dtype) {
#define JAX_RING_CASE(name, element) \
  case DType::name:                  \
    return with(element{});
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_CASE)
#undef JAX_RING_CASE
    case DType::count:
      break;
  }
}

// The ranks' mailboxes and all that goes with them.
class Peers {
 public:
  // first: what all counters start from. They wrap around in the long run, which a test cannot wait for.
  explicit Peers(Capacity capacity, uint32_t first = 0)
      : capacity_(capacity),
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

  // Each team of each of these ranks makes the calls one after the other, and waits for nobody in between.
  void run(std::vector<PeerCall>& calls, const std::vector<int>& ranks, double deadline_seconds = 60) {
    std::vector<std::thread> threads;
    for (int rank : ranks) {
      for (int cta = 0; cta < capacity_.num_ctas; ++cta) {
        threads.emplace_back([&, rank, cta] {
          const Endpoint self = endpoint(rank, deadline_seconds);
          std::minstd_rand random(static_cast<unsigned>(1000 * rank + cta));
          const Dawdler team(random);
          for (PeerCall& call : calls) {
            const Message message = call.message(rank);
            all_reduce_any(call.dtype, call.algorithm, self, message, call.order, cta, team);
          }
        });
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
  std::vector<Bytes> mailboxes_;
  std::vector<std::vector<Progress>> progress_;
  std::vector<uint32_t> failed_;
  std::vector<Failure> failures_;
};

// Compares every rank's results with the definition.
inline void expect_results(PeerCall& call, const std::vector<Bytes>& expected) {
  for (size_t rank = 0; rank < call.inputs.size(); ++rank) {
    for (size_t i = 0; i < call.counts.size(); ++i) {
      OffsetBuffer& got = call.in_place ? call.inputs[rank][i] : call.outputs[rank][i];
      const auto difference = first_difference(call.dtype, got.data(), expected[i].data(), call.counts[i]);
      ASSERT_FALSE(difference.has_value())
          << name_of(call.dtype) << ", algorithm " << static_cast<int>(call.algorithm) << ", order "
          << static_cast<int>(call.order) << ", rank " << rank << " of " << call.inputs.size() << ", operand " << i
          << " of " << call.counts[i] << " elements: the first wrong one is " << *difference;
    }
  }
}

}  // namespace jax_ring::cpu::testing
