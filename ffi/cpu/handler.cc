// handler.cc: the stages of the custom call: what it says of itself, and its way to the rendezvous and the engine.
#include "cpu/handler.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "common/describe.h"
#include "common/error_code.h"
#include "common/flight_recorder.h"
#include "common/hash.h"
#include "common/trees.h"
#include "common/xla_types.h"
#include "cpu/completion_threads.h"
#include "cpu/decode.h"
#include "cpu/engine.h"
#include "cpu/float_mode.h"
#include "cpu/huge_pages.h"
#include "cpu/rendezvous.h"
#include "shm/communicators.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

// What a call returns that is done already: the runtime then goes on without the objects of a future.
struct Done {};
using Result = std::variant<Done, ffi::Future>;

}  // namespace
}  // namespace jax_ring::cpu

template <xla::ffi::ExecutionStage stage>
struct xla::ffi::ResultEncoding<stage, jax_ring::cpu::Result> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                                              jax_ring::cpu::Result result) {
    if (std::holds_alternative<jax_ring::cpu::Done>(result)) return static_cast<XLA_FFI_Error*>(nullptr);
    return ResultEncoding<stage, Future>::Encode(api, context, std::get<Future>(std::move(result)));
  }
};

namespace jax_ring::cpu {
namespace {

// A group that spans several processes.
struct CrossProcessGroup {
  std::shared_ptr<shm::Communicator> communicator;
  Thresholds thresholds;
  std::unique_ptr<shm::LaunchIds> launch_ids;  // of this call in this group
};

// One per call instruction and process, owned by the runtime.
struct CallSite {
  static ffi::TypeId id;
  CallSite(ReplicaGroups groups, std::string text, const Plan& of_call, std::vector<int> all_sources, Op op)
      : rendezvous_map(std::move(groups), text),
        plan(of_call),
        sources(std::move(all_sources)),
        op(op),
        text(std::make_shared<std::string>(std::move(text))) {
    plan.sources = sources.data();
  }
  const uint64_t number = next_number.fetch_add(1, std::memory_order_relaxed);  // of no other call site
  RendezvousMap rendezvous_map;
  Plan plan;
  std::vector<int> sources;   // of the plan
  std::vector<int64_t> part;  // of an array
  Op op;
  flight::RecordedCall* recorded = nullptr;
  Trees trees;
  // For groups that span several processes.
  std::shared_ptr<const std::string> text;  // for error messages
  std::optional<Algorithm> algorithm;
  Hash hash;  // of what identifies the call, the same in all processes
  std::vector<std::optional<CrossProcessGroup>>
      groups;  // nullopt if a group is within one process, or has no rank here

 private:
  static std::atomic<uint64_t> next_number;
};
ffi::TypeId CallSite::id = {};
std::atomic<uint64_t> CallSite::next_number{1};

bool is_one_shot(const CallSite& site, const Message& message, const Thresholds& thresholds) {
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  const Algorithm chosen = choose(count * element_size(message.dtype), thresholds);
  return site.algorithm.value_or(chosen) == Algorithm::one_shot;
}

// Equal calls of a program are distinguished by the order in which a process builds them. `program` is the program's
// name and a digest of its text, the same in all processes, then '#' and how often this process has lowered it, which
// differs between processes. numbers: the sources of a permutation, what defines the trees of the call's groups, and
// the part of an array.
Hash identity_of(std::string_view call, std::string_view program, const Plan& plan, Op op,
                 std::optional<Algorithm> algorithm, std::initializer_list<ffi::Span<const int64_t>> numbers) {
  Hash hash;
  hash.add(call).add(program.substr(0, program.rfind('#')));
  hash.add(plan.collective).add(plan.order).add(plan.root).add(op).add(algorithm.value_or(Algorithm::count));
  for (const auto& span : numbers) {
    for (int64_t number : span) hash.add(number);
  }
  return hash.add(
      shm::Communicators::instance().next_index(std::string(program) + ": " + std::to_string(hash.value())));
}

void find_communicators(CallSite& site, ffi::Span<const int64_t> partitions, ffi::Span<const int64_t> processes,
                        ffi::Span<const int64_t> group_sizes, ffi::Span<const int64_t> one_shot_bytes,
                        ffi::Span<const int64_t> two_shot_bytes) {
  auto& all = shm::Communicators::instance();
  const int64_t self = all.process();
  size_t next = 0;
  for (size_t group = 0; group < group_sizes.size(); ++group) {
    std::vector<shm::Member> members;
    Hash hash = site.hash;
    size_t local = 0;
    for (const size_t end = next + group_sizes[group]; next < end; ++next) {
      members.emplace_back(processes[next], partitions[next]);
      hash.add(processes[next]).add(partitions[next]);
      local += processes[next] == self;
    }
    site.groups.emplace_back();
    if (local == 0 || local == members.size()) continue;
    if (one_shot_bytes.size() != group_sizes.size() || two_shot_bytes.size() != group_sizes.size()) {
      throw std::invalid_argument("jax_ring: there must be one threshold of each kind per group");
    }
    const Thresholds thresholds{static_cast<uint64_t>(one_shot_bytes[group]),
                                static_cast<uint64_t>(two_shot_bytes[group])};
    site.groups.back() = {all.get_or_create(members), thresholds,
                          std::make_unique<shm::LaunchIds>(all.run_counter(hash.value()))};
  }
}

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(ffi::ThreadPool& pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Whether further parts of an array follow that an all-gather is for. They cross hosts meanwhile.
bool is_followed(const CallSite& site, ffi::RemainingRets rets) {
  if (site.part.empty() || site.plan.collective != Collective::all_gather) return false;
  return static_cast<size_t>(site.part[0] + site.part[1]) < (**rets.get<ffi::AnyBuffer>(0)).element_count();
}

// The parts of an array are gathered into one result, whose memory is mostly fresh. Page faults would take the time
// that XLA needs to copy and to add what crosses hosts.
void prepare_result(const CallSite& site, ffi::RemainingRets rets) {
  if (site.part.empty() || site.plan.collective != Collective::all_gather || site.part[0] > 0) return;
  ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(0);
  advise_huge_pages(result.untyped_data(), result.size_bytes());
}

std::vector<bool> are_local(ffi::Span<const int64_t> processes) {
  std::vector<bool> local;
  for (int64_t process : processes) local.push_back(process == shm::Communicators::instance().process());
  return local;
}

void record(CallSite& site, std::string_view collective, ffi::Span<const int64_t> partitions,
            ffi::Span<const int64_t> processes, ffi::Span<const int64_t> group_sizes) {
  std::vector<flight::Members> groups;
  size_t next = 0;
  for (int64_t size : group_sizes) {
    groups.push_back({{partitions.begin() + next, partitions.begin() + next + size},
                      {processes.begin() + next, processes.begin() + next + size}});
    next += size;
  }
  auto& recorder = flight::Recorder::instance();
  site.recorded = recorder.add(*site.text, collective, std::move(groups));
  site.rendezvous_map.record(site.recorded, recorder.memory());
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(
    std::string_view collective, std::string_view op, int64_t root, ffi::Span<const int64_t> sources,
    std::string_view algorithm, std::string_view order, ffi::Span<const int64_t> partitions,
    ffi::Span<const int64_t> processes, ffi::Span<const int64_t> group_sizes, ffi::Span<const int64_t> one_shot_bytes,
    ffi::Span<const int64_t> two_shot_bytes, ffi::Span<const int64_t> tree_shards, ffi::Span<const int64_t> tree_sizes,
    ffi::Span<const int64_t> tree_ranks, ffi::Span<const int64_t> part, std::string_view call, std::string_view lines,
    std::string_view program) {
  try {
    const Plan plan{named<Collective>(collective, kCollectives), named<Order>(order, kOrders), static_cast<int>(root)};
    for (int64_t size : group_sizes) {
      if (root < 0 || root >= size) throw std::invalid_argument("jax_ring: the root is not in every group");
    }
    if (processes.size() != partitions.size()) {
      throw std::invalid_argument("jax_ring: there must be one process per partition");
    }
    ReplicaGroups groups({partitions.begin(), partitions.end()}, {group_sizes.begin(), group_sizes.end()},
                         are_local(processes));
    auto site = std::make_unique<CallSite>(std::move(groups), describe(call, lines), plan,
                                           sources_of(plan, sources, group_sizes), named<Op>(op, kOps));
    site->algorithm = algorithm_of(algorithm);
    site->part = {part.begin(), part.end()};
    site->trees = trees_of(plan, group_sizes, tree_shards, tree_sizes, tree_ranks);
    if (!program.empty()) {
      site->hash = identity_of(call, program, plan, site->op, site->algorithm,
                               {sources, tree_shards, tree_sizes, tree_ranks, part});
    }
    find_communicators(*site, partitions, processes, group_sizes, one_shot_bytes, two_shot_bytes);
    record(*site, collective, partitions, processes, group_sizes);
    return site;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

// By what the other processes know a call that a loop makes again and again, the same in one execution.
struct Identity {
  uint64_t site = 0;
  int group = 0;
  int64_t run_id = 0;
  uint64_t id = 0;
  bool one_shot = false;
};

Identity identity_of(const CallSite& site, int group, int64_t run_id, const Message& message) {
  const CrossProcessGroup& processes = *site.groups[group];
  const auto [run, launch] = processes.launch_ids->get(run_id);
  const bool one_shot = is_one_shot(site, message, processes.thresholds);
  Hash hash = site.hash;
  hash.add(run).add(launch).add(message.dtype).add(one_shot);
  for (size_t count : message.counts) hash.add(count);
  return {site.number, group, run_id, hash.value(), one_shot};
}

// What completes a call later.
struct Pending {
  ffi::Promise promise;
  ffi::Future future{promise};
};

// What a thread keeps from one call for the next, so that a loop of small calls neither allocates memory nor finds out
// again what it knows.
struct Kept {
  Participant participant;
  shm::Call call;
  Identity identity;  // of the last call between processes
  // Of the last one that was done at once.
  std::optional<Pending> pending;
  RendezvousPtr rendezvous;
};

// Runs the call of a group that spans several processes. Returns its rendezvous if it is done, else null.
RendezvousPtr run_between_processes(const CallSite& site, RendezvousPtr rendezvous, Kept& kept) {
  Identity& known = kept.identity;
  if (known.site != site.number || known.group != rendezvous->group || known.run_id != rendezvous->run_id) {
    known = identity_of(site, rendezvous->group, rendezvous->run_id, kept.call.message);
  }
  rendezvous->entry.identify(known.id);
  kept.call.rendezvous = std::move(rendezvous);
  kept.call.id = known.id;
  kept.call.one_shot = known.one_shot;
  if (kept.call.text != site.text) kept.call.text = site.text;
  return site.groups[known.group]->communicator->submit(std::move(kept.call));
}

void note_bytes(flight::RecordedCall& call, const Message& message) {
  if (call.bytes_per_rank.load(std::memory_order_relaxed) != 0) return;
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  call.bytes_per_rank.store(count * message.operand_element_bytes(), std::memory_order_relaxed);
}

// The runtime's error of a failure, from its text.
ffi::Error error_of(const std::string& text) {
  switch (code_of(text)) {
    case ErrorCode::resource_exhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(without_code(text)));
    case ErrorCode::failed_precondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string(without_code(text)));
    case ErrorCode::deadline_exceeded:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text);
}

// The completion may run on another thread, and the rank's program must compute there as it would have here.
Completion completion_of(const ffi::Promise& to_complete) {
  return [promise = to_complete, mode = FloatMode::current()](const std::string* error) mutable {
    const ScopedFloatMode as_before(mode);
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(error_of(*error));
    }
  };
}

Result execute(CallSite* site, ffi::RunId run, ffi::ThreadPool pool, ffi::BufferR0<ffi::U32> partition,
               ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary /*seen by instantiate*/) {
  thread_local Kept kept;
  Pending pending = kept.pending ? *std::exchange(kept.pending, std::nullopt) : Pending();
  try {
    const ReplicaGroups& groups = site->rendezvous_map.groups();
    const int group = groups.place(*partition.typed_data()).group;
    Message& message = kept.call.message;
    Participant& participant = kept.participant;
    message.plan = site->plan;
    message.op = site->op;
    message.tree = site->trees.of_group.empty() ? nullptr : &site->trees.of_group[group];
    message.num_results = site->trees.num_results;
    message.counts.clear();
    message.slices = nullptr;
    message.decodes = false;
    participant.inputs.clear();
    participant.outputs.clear();
    decode(groups.size(group), site->part, args, rets, message, participant);
    if (message.decodes && site->groups[group].has_value()) {
      throw std::invalid_argument("packets are decoded within one process only");
    }
    if (site->recorded != nullptr) note_bytes(*site->recorded, message);
    prepare_result(*site, rets);
    participant.done = completion_of(pending.promise);
    const bool is_alone = groups.num_local(group) == 1;
    auto& map = site->rendezvous_map;
    RendezvousPtr rendezvous = is_alone ? map.arrive_alone(run.run_id, *partition.typed_data(), std::move(participant),
                                                           std::move(kept.rendezvous))
                                        : map.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (rendezvous == nullptr) return std::move(pending.future);
    if (!site->groups[group].has_value()) {
      if (is_followed(*site, rets)) {
        // The next part crosses hosts, and the links must not wait.
        run_collective_beside(std::move(rendezvous), message);
      } else {
        XlaWorkers workers(pool);
        run_collective(std::move(rendezvous), message, workers);
      }
      return std::move(pending.future);
    }
    rendezvous = run_between_processes(*site, std::move(rendezvous), kept);
    if (rendezvous == nullptr) return std::move(pending.future);
    if (is_alone) {
      rendezvous->clear();
      kept.rendezvous = std::move(rendezvous);
      kept.pending = std::move(pending);
      return Done{};
    }
    CompletionThreads::instance().complete(std::move(rendezvous));
  } catch (const std::invalid_argument& error) {
    pending.promise.SetError(ffi::Error::InvalidArgument(*site->text + ": " + error.what()));
  } catch (const std::exception& error) {
    pending.promise.SetError(ffi::Error::Internal(error.what()));
  }
  return std::move(pending.future);
}

// A barrier of the ranks of this process. It has the state of a call, for the sake of one FFI type.
ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_barrier(ffi::Span<const int64_t> partitions,
                                                            ffi::Span<const int64_t> processes) {
  try {
    ReplicaGroups groups({partitions.begin(), partitions.end()}, {static_cast<int64_t>(partitions.size())},
                         are_local(processes));
    return std::make_unique<CallSite>(std::move(groups), "", Plan{}, std::vector<int>{}, Op::sum);
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

ffi::Future execute_barrier(CallSite* site, ffi::RunId run, ffi::BufferR0<ffi::U32> partition,
                            ffi::RemainingArgs /*awaited*/, ffi::Dictionary /*seen by instantiate_barrier*/) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    Participant participant;
    participant.done = completion_of(promise);
    auto rendezvous = site->rendezvous_map.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (rendezvous != nullptr) CompletionThreads::instance().complete(std::move(rendezvous));
  } catch (const std::exception& error) {
    promise.SetError(ffi::Error::Internal(error.what()));
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("collective")
                           .Attr<std::string_view>("op")
                           .Attr<int64_t>("root")
                           .Attr<ffi::Span<const int64_t>>("sources")
                           .Attr<std::string_view>("algorithm")
                           .Attr<std::string_view>("order")
                           .Attr<ffi::Span<const int64_t>>("partitions")
                           .Attr<ffi::Span<const int64_t>>("processes")
                           .Attr<ffi::Span<const int64_t>>("group_sizes")
                           .Attr<ffi::Span<const int64_t>>("one_shot_bytes")
                           .Attr<ffi::Span<const int64_t>>("two_shot_bytes")
                           .Attr<ffi::Span<const int64_t>>("tree_shards")
                           .Attr<ffi::Span<const int64_t>>("tree_sizes")
                           .Attr<ffi::Span<const int64_t>>("tree_ranks")
                           .Attr<ffi::Span<const int64_t>>("part")
                           .Attr<std::string_view>("call")
                           .Attr<std::string_view>("site")
                           .Attr<std::string_view>("program"));

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(instantiate_barrier_handler, instantiate_barrier,
                       ffi::Ffi::BindInstantiate()
                           .Attr<ffi::Span<const int64_t>>("partitions")
                           .Attr<ffi::Span<const int64_t>>("processes"));

XLA_FFI_DEFINE_HANDLER(execute_barrier_handler, execute_barrier,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .Attrs());

}  // namespace

XLA_FFI_Error* barrier_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_barrier_handler(call_frame); }
XLA_FFI_Error* barrier_execute(XLA_FFI_CallFrame* call_frame) { return execute_barrier_handler(call_frame); }

XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

XLA_FFI_TypeInfo* call_site_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_ring::cpu
