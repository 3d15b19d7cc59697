// device_model.cc: the GPU kernels' algorithms, from ffi/device, on the model's memory.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "device/algorithm.h"
#include "model/scenarios.h"

namespace jax_ring {
namespace {

using model::NamedScenario;
using model::Options;
using Element = Native<uint32_t>;

constexpr uint64_t kValuesPerPack = kPackBytes / sizeof(uint32_t);

// Threads that work together, as a CTA does.
struct ModelTeam {
  model::Barrier* barrier;
  int index, count;
  uint64_t* first;  // of_first()'s

  int thread() const { return index; }
  int size() const { return count; }
  void sync() const { barrier->arrive(); }
  bool all(bool mine) const { return barrier->arrive(mine); }
  uint64_t of_first(uint64_t value) const {
    if (index == 0) *first = value;
    sync();
    const uint64_t result = *first;
    sync();  // before the next value
    return result;
  }
};

struct Call {
  Algorithm algorithm;
  Plan plan;
  uint64_t num_packs;  // of each rank's operand, or of a block of it
  bool in_place = false;
  std::vector<uint32_t> fingerprints = {};  // by rank, if they differ
};

// A group's memory, and its actions.
class Group {
 public:
  Group(const Capacity& capacity, int num_threads, uint32_t first, bool has_switch = false)
      : capacity_(capacity), num_threads_(num_threads), has_switch_(has_switch), ranks_(capacity.num_ranks) {
    for (Rank& rank : ranks_) {
      rank.memory.assign(capacity.bytes() + kFlagBytes, 0);
      rank.progress.assign(capacity.num_ctas, Progress{first, first, first, first});
      rank.firsts.assign(capacity.num_ctas, 0);
      unsigned char* const mailbox = mailbox_of(rank);
      for (size_t at = 0; at < capacity.flags_bytes(); at += kFlagBytes) {
        const uint64_t flag = flag_value(0, first);
        memcpy(mailbox + at, &flag, sizeof(flag));
      }
      // Lines swept long ago.
      for (size_t at = capacity.lines(0, 0, 0); at < capacity.lines_end(); at += sizeof(uint64_t)) {
        const uint64_t word = static_cast<uint64_t>(first - 2) << 32 | 0xbad;
        memcpy(mailbox + at, &word, sizeof(word));
      }
      const std::string name = "mailbox of rank " + std::to_string(&rank - ranks_.data());
      model::name_memory(mailbox, capacity.bytes(), name);
      model::name_memory(&rank.failed, sizeof(rank.failed), "failed of rank " + std::to_string(&rank - ranks_.data()));
      for (int cta = 0; cta < capacity.num_ctas; ++cta) {
        rank.barriers.push_back(std::make_unique<model::Barrier>(num_threads));
      }
    }
  }

  // Each team makes the calls one after the other. Before each call, each thread runs before(...).
  using Before = std::function<void(Group&, int rank, int thread, size_t call)>;
  void spawn(std::vector<Call> calls, Before before = {}, bool may_wait = false) {
    calls_ = std::move(calls);
    before_ = std::move(before);
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (int rank = 0; rank < num_ranks(); ++rank) allocate(rank, i);
    }
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (int cta = 0; cta < capacity_.num_ctas; ++cta) {
        for (int thread = 0; thread < num_threads_; ++thread) {
          const std::string name =
              "rank " + std::to_string(rank) + ", team " + std::to_string(cta) + ", thread " + std::to_string(thread);
          (may_wait ? model::spawn_daemon : model::spawn)(name, [=] { run(rank, cta, thread); });
        }
      }
    }
  }

  void expect_results() const {
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (int rank = 0; rank < num_ranks(); ++rank) {
        const Buffers& buffers = ranks_[rank].calls[i];
        const std::vector<uint32_t>& got = calls_[i].in_place ? buffers.input : buffers.output;
        for (size_t at = 0; at < buffers.expected.size(); ++at) {
          if (got[at] == buffers.expected[at]) continue;
          model::fail("wrong result of rank " + std::to_string(rank) + " in call " + std::to_string(i) + " at " +
                      std::to_string(at) + ": " + std::to_string(got[at]) + " and not " +
                      std::to_string(buffers.expected[at]));
        }
      }
    }
  }
  void expect_no_failure() const {
    for (const Rank& rank : ranks_) model::require(rank.failed == 0, "a rank has failed");
  }
  // The failed ranks ended because they make different calls, and nothing can be mistaken for a result. The others wait
  // for them; their deadline is elsewhere.
  void expect_mismatch() const {
    int num_ended = 0;
    for (const Rank& rank : ranks_) {
      if (!rank.has_ended) continue;
      ++num_ended;
      model::require(rank.failed == 1 && rank.failure.kind == static_cast<uint32_t>(FailureKind::mismatch),
                     "a mismatch was not reported");
      for (uint32_t value : rank.calls.back().output) {
        model::require(value == ~uint32_t{0}, "a call that failed left a result");
      }
    }
    model::require(num_ended > 0, "a mismatch was not reported");
  }

  int num_ranks() const { return capacity_.num_ranks; }
  // Takes one-shot's epoch back by so many rounds.
  void rewind_one_shot(int rank, uint32_t rounds) {
    const DeviceAtomic<uint64_t> turn(ranks_[rank].progress[0].turn);
    turn.store(static_cast<uint32_t>(turn.load(std::memory_order_relaxed)) - rounds, std::memory_order_relaxed);
  }

 private:
  struct Buffers {
    std::vector<uint32_t> input, output, expected;
  };
  struct Rank {
    std::vector<unsigned char> memory;
    std::vector<Progress> progress;
    std::vector<std::unique_ptr<model::Barrier>> barriers;
    std::vector<uint64_t> firsts;  // of each team's of_first()
    uint32_t failed = 0;
    bool has_ended = false;
    Failure failure{};
    std::vector<Buffers> calls;
  };

  static unsigned char* mailbox_of(Rank& rank) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(rank.memory.data());
    return rank.memory.data() + (kFlagBytes - at % kFlagBytes) % kFlagBytes;
  }

  // A value that shows its origin, even in a sum.
  static uint32_t input_value(size_t call, int rank, size_t at) {
    return static_cast<uint32_t>((1u << 24 | 1u) * (call * 64 + at + 1) << (4 * rank));
  }

  void allocate(int rank, size_t index) {
    const Call& call = calls_[index];
    const size_t p = num_ranks(), block = call.num_packs * kValuesPerPack;
    const bool scatters = call.plan.collective == Collective::reduce_scatter;
    const size_t count = num_input_blocks(call.plan, num_ranks()) * block;
    Buffers buffers;
    for (size_t at = 0; at < count; ++at) buffers.input.push_back(input_value(index, rank, at));
    buffers.output.assign(result_count(call.plan, p, count), 0xa5a5a5a5u);
    buffers.expected.assign(buffers.output.size(), 0);
    for (size_t at = 0; at < buffers.expected.size(); ++at) {
      switch (call.plan.collective) {
        case Collective::all_gather:
          buffers.expected[at] = input_value(index, static_cast<int>(at / block), at % block);
          break;
        case Collective::broadcast:
          buffers.expected[at] = input_value(index, call.plan.root, at);
          break;
        case Collective::all_to_all:
          buffers.expected[at] = input_value(index, static_cast<int>(at / block), rank * block + at % block);
          break;
        case Collective::permute:
          if (call.plan.sources[rank] == kNoRank) break;
          buffers.expected[at] = input_value(index, call.plan.sources[rank], at);
          break;
        default:
          if (call.plan.collective == Collective::reduce && rank != call.plan.root) break;
          for (size_t source = 0; source < p; ++source) {
            buffers.expected[at] += input_value(index, static_cast<int>(source), scatters ? rank * block + at : at);
          }
      }
    }
    model::name_memory(buffers.input.data(), count * sizeof(uint32_t), "an input of rank " + std::to_string(rank));
    model::name_memory(buffers.output.data(), buffers.output.size() * sizeof(uint32_t),
                       "an output of rank " + std::to_string(rank));
    ranks_[rank].calls.push_back(std::move(buffers));
  }

  void run(int index, int cta, int thread) {
    Rank& rank = ranks_[index];
    const ModelTeam team{rank.barriers[cta].get(), thread, num_threads_, &rank.firsts[cta]};
    Endpoint self{};
    self.capacity = capacity_;
    self.rank = index;
    for (int peer = 0; peer < num_ranks(); ++peer) self.mailbox[peer] = mailbox_of(ranks_[peer]);
    if (has_switch_) self.multicast = self.mailbox[0];  // the switch is a loop: see multimem.h
    self.progress = rank.progress.data();
    self.failed = &rank.failed;
    self.failure = &rank.failure;
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (before_) before_(*this, index, thread, i);
      team.sync();  // a launch follows the previous one
      const Call& call = calls_[i];
      Buffers& buffers = rank.calls[i];
      Message message{};
      message.num_packs = call.num_packs;
      message.num_operands = 1;
      message.fingerprint = call.fingerprints.empty() ? static_cast<uint32_t>(7 + i) : call.fingerprints[index];
      message.route = route_of(call.plan, num_ranks(), index);
      message.num_blocks = num_blocks(call.plan, num_ranks(), 1);
      unsigned char* const input = reinterpret_cast<unsigned char*>(buffers.input.data());
      message.operands[0] = {input, call.in_place ? input : reinterpret_cast<unsigned char*>(buffers.output.data()),
                             call.num_packs * kPackBytes, 0};
      switch (call.algorithm) {
        case Algorithm::one_shot:
          run_team<Element, Sum, Algorithm::one_shot>(self, message, call.plan, cta, team);
          break;
        case Algorithm::two_shot:
          if (only_moves(call.plan)) {
            run_team<Native<uint8_t>, Sum, Algorithm::two_shot>(self, message, call.plan, cta, team);
          } else {
            run_team<Element, Sum, Algorithm::two_shot>(self, message, call.plan, cta, team);
          }
          break;
        case Algorithm::multicast:
          run_team<Element, Sum, Algorithm::multicast>(self, message, call.plan, cta, team);
          break;
        default:
          run_team<Element, Sum, Algorithm::ring>(self, message, call.plan, cta, team);
      }
      team.sync();
    }
    rank.has_ended = true;
  }

  const Capacity capacity_;
  const int num_threads_;
  const bool has_switch_;
  std::vector<Rank> ranks_;
  std::vector<Call> calls_;
  Before before_;
};

// As little memory as gives each thread work, so that it is reused again and again.
Capacity small_capacity(int num_ranks, int num_threads, int num_ctas = 1) {
  Capacity capacity{};
  capacity.num_ranks = num_ranks;
  capacity.num_ctas = num_ctas;
  capacity.one_shot_packs = std::max(2, num_threads);
  capacity.part_packs = num_threads;
  capacity.slot_packs = num_threads;
  capacity.num_slots = 2;
  return capacity;
}

// Two rounds before the counters wrap around.
constexpr uint32_t kFirst = 0xfffffffe;

// Calls that succeed, with these initial counters.
std::function<void()> succeeds(int num_ranks, int num_threads, std::vector<Call> calls, int num_ctas = 1,
                               uint64_t num_slots = 2, bool has_switch = false) {
  return [=] {
    Capacity capacity = small_capacity(num_ranks, num_threads, num_ctas);
    capacity.num_slots = num_slots;
    const auto group = std::make_shared<Group>(capacity, num_threads, kFirst, has_switch);
    group->spawn(calls);
    model::at_end([group] {
      group->expect_no_failure();
      group->expect_results();
    });
  };
}

// Ranks that make different calls.
std::function<void()> mismatches(Call call) {
  return [=]() mutable {
    const auto group = std::make_shared<Group>(small_capacity(2, 1), 1, kFirst);
    call.fingerprints = {1, 2};
    group->spawn({call}, {}, true);
    model::at_end([group] { group->expect_mismatch(); });
  };
}

// One-shot after 2^32 rounds: a full-size round, as many small ones as it takes to sweep all lines, and another
// full-size round with the epoch of the first. The small ones are the last of 2^32; the skipped ones were alike.
std::function<void()> one_shot_wraps_around(int num_threads) {
  return [=] {
    const Capacity capacity = small_capacity(2, num_threads);
    const size_t num_small = 2 * capacity.num_lines() + 1;  // odd: the two sets of lines alternate
    const auto group = std::make_shared<Group>(capacity, num_threads, kFirst);
    std::vector<Call> calls(2 + num_small, Call{Algorithm::one_shot, {}, 1});
    calls.front().num_packs = calls.back().num_packs = capacity.one_shot_packs;
    group->spawn(calls, [num_small](Group& all, int rank, int thread, size_t call) {
      if (call == 1 && thread == 0) all.rewind_one_shot(rank, static_cast<uint32_t>(num_small + 1));
      if (call == num_small + 1) model::see_latest();
    });
    model::at_end([group] {
      group->expect_no_failure();
      group->expect_results();
    });
  };
}

std::vector<Call> rounds(Algorithm algorithm, Plan plan, uint64_t num_packs) {
  return {{algorithm, plan, num_packs}, {algorithm, plan, 1, true}, {algorithm, plan, num_packs}};
}

// The sources of permutations: the next rank, by the number of ranks; and rank 1 for the first rank alone.
constexpr int kNextRank[][3] = {{}, {0}, {1, 0}, {1, 2, 0}};
constexpr int kOneRank[] = {1, kNoRank, kNoRank};

// Every collective of two-shot, in one sequence.
std::vector<Call> all_collectives(int num_ranks) {
  std::vector<Call> calls;
  for (const Plan& plan :
       {Plan{Collective::all_reduce}, Plan{Collective::reduce_scatter}, Plan{Collective::reduce_scatter, Order::ring},
        Plan{Collective::all_gather}, Plan{Collective::reduce, Order::rank, num_ranks - 1},
        Plan{Collective::broadcast, Order::rank, 0}, Plan{Collective::reduce, Order::rank, 0},
        Plan{Collective::broadcast, Order::rank, num_ranks - 1}, Plan{Collective::all_to_all},
        Plan{Collective::permute, Order::rank, 0, kNextRank[num_ranks]}, Plan{Collective::all_reduce},
        Plan{Collective::permute, Order::rank, 0, kOneRank}, Plan{Collective::all_to_all},
        Plan{Collective::all_reduce}}) {
    calls.push_back({Algorithm::two_shot, plan, 2});
  }
  return calls;
}

// Exchanges of six rounds each, one after the other.
std::vector<Call> exchanges(int num_ranks, int num_threads) {
  std::vector<Call> calls;
  for (const Plan& plan :
       {Plan{Collective::all_to_all}, Plan{Collective::permute, Order::rank, 0, kOneRank},
        Plan{Collective::permute, Order::rank, 0, kNextRank[num_ranks]}, Plan{Collective::all_to_all}}) {
    calls.push_back({Algorithm::two_shot, plan, 5 * static_cast<uint64_t>(num_threads) + 1});
  }
  return calls;
}

std::vector<NamedScenario> scenarios() {
  const Plan all_reduce{}, ring_order{Collective::all_reduce, Order::ring};
  Options exhaustive;
  Options random;
  random.exhaustive = false;
  random.max_executions = 1000;
  std::vector<NamedScenario> list;
  for (const auto& [ranks, threads] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}}) {
    const std::string size = ", " + std::to_string(ranks) + " ranks x " + std::to_string(threads);
    list.push_back(
        {"one-shot" + size, exhaustive, succeeds(ranks, threads, rounds(Algorithm::one_shot, all_reduce, 3))});
    list.push_back({"two-shot" + size, exhaustive,
                    succeeds(ranks, threads, rounds(Algorithm::two_shot, all_reduce, 5 * ranks * threads + 1))});
    list.push_back({"two-shot collectives" + size, exhaustive, succeeds(ranks, threads, all_collectives(ranks))});
    list.push_back({"exchanges" + size, exhaustive, succeeds(ranks, threads, exchanges(ranks, threads))});
    // The switch is a loop here: it loads and stores at one rank after the other.
    const uint64_t rounds_of_4 = 3 * ranks * threads + 1;
    list.push_back({"multicast" + size, exhaustive,
                    succeeds(ranks, threads, rounds(Algorithm::multicast, all_reduce, rounds_of_4), 1, 2, true)});
    list.push_back({"multicast and two-shot" + size, exhaustive,
                    succeeds(ranks, threads,
                             {{Algorithm::multicast, all_reduce, rounds_of_4},
                              {Algorithm::two_shot, all_reduce, rounds_of_4, true},
                              {Algorithm::multicast, all_reduce, 1},
                              {Algorithm::two_shot, {Collective::reduce_scatter}, 2},
                              {Algorithm::two_shot, {Collective::all_gather}, 2},
                              {Algorithm::multicast, all_reduce, rounds_of_4}},
                             1, 2, true)});
    // A ring has many executions, because a rank may run ahead by as many items as there are slots.
    for (Order order : {Order::rank, Order::ring}) {
      const Plan plan{Collective::all_reduce, order};
      const std::string name = order == Order::rank ? "ring, order of ranks" : "ring, order of the ring";
      const uint64_t chunk = threads;
      const Call large{Algorithm::ring, plan, 3 * chunk}, small{Algorithm::ring, plan, chunk, true};
      if (ranks == 2) {
        list.push_back({name + size, exhaustive, succeeds(ranks, threads, {large, small})});
      } else {
        list.push_back({name + ", a call" + size, exhaustive, succeeds(ranks, threads, {large})});
        list.push_back({name + size, random, succeeds(ranks, threads, {large, small, large})});
      }
    }
  }
  // Threads that neither check the header of all ranks nor have a pack in each round.
  list.push_back({"one-shot, 3 ranks x 3", exhaustive,
                  succeeds(3, 3, {{Algorithm::one_shot, all_reduce, 4}, {Algorithm::one_shot, all_reduce, 3}})});
  list.push_back({"one-shot after 2^32 rounds", exhaustive, one_shot_wraps_around(1)});
  list.push_back({"one-shot after 2^32 rounds, teams of 2", exhaustive, one_shot_wraps_around(2)});
  for (Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring, Algorithm::multicast}) {
    list.push_back({"different calls, algorithm " + std::to_string(static_cast<int>(algorithm)), exhaustive,
                    mismatches({algorithm, {}, 1})});
  }
  std::vector<Call> mixed;
  for (int i = 0; i < 3; ++i) {
    mixed.push_back({Algorithm::one_shot, all_reduce, 3});
    mixed.push_back({Algorithm::ring, i % 2 == 0 ? ring_order : all_reduce, 4});
    mixed.push_back({Algorithm::two_shot, all_reduce, 7});
  }
  random.max_executions = 300;
  list.push_back({"all algorithms, 3 ranks x 2 teams x 2", random, succeeds(3, 2, mixed, 2, 4)});
  return list;
}

}  // namespace
}  // namespace jax_ring

int main(int argc, char** argv) { return jax_ring::model::run_scenarios(jax_ring::scenarios(), argc, argv); }
