// handler.cc: decodes and checks the custom call, and passes it to the rendezvous and the engine.
#include "cpu/handler.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/describe.h"
#include "common/error_code.h"
#include "common/flight_recorder.h"
#include "common/hash.h"
#include "common/trees.h"
#include "common/xla_types.h"
#include "cpu/completion_threads.h"
#include "cpu/engine.h"
#include "cpu/float_mode.h"
#include "cpu/ragged.h"
#include "cpu/rendezvous.h"
#include "shm/communicators.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

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
  RendezvousMap rendezvous_map;
  Plan plan;
  std::vector<int> sources;  // of the plan
  Op op;
  flight::RecordedCall* recorded = nullptr;
  Trees trees;
  // For groups that span several processes.
  std::shared_ptr<const std::string> text;  // for error messages
  std::optional<Algorithm> algorithm;
  Hash hash;  // of what identifies the call, the same in all processes
  std::vector<std::optional<CrossProcessGroup>>
      groups;  // nullopt if a group is within one process, or has no rank here
};
ffi::TypeId CallSite::id = {};

bool is_one_shot(const CallSite& site, const Message& message, const Thresholds& thresholds) {
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  const Algorithm chosen = choose(count * element_size(message.dtype), thresholds);
  return site.algorithm.value_or(chosen) == Algorithm::one_shot;
}

// Equal calls of a program are distinguished by the order in which a process builds them. `program` is the program's
// name and a digest of its text, the same in all processes, then '#' and how often this process has lowered it, which
// differs between processes. numbers: the sources of a permutation, and what defines the trees of the call's groups.
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

// Elements of an operand of a call, or of one of its slots if it has several, from those of the operand and its result.
size_t count_of(const CallSite& site, int group, size_t operand, size_t result) {
  const int group_size = site.rendezvous_map.groups().size(group);
  if (!folds_along_tree(site.plan)) {
    if (result == result_count(site.plan, group_size, operand)) return operand;
    throw std::invalid_argument("jax_ring: the size of a result does not match its operand and the group size");
  }
  const size_t slots = site.trees.of_group[group].num_slots();
  const size_t results = site.plan.collective == Collective::reduce_scatter ? site.trees.num_results : 1;
  const size_t count = operand / slots;
  if (operand == slots * count && result == results * result_count(site.plan, group_size, count)) return count;
  throw std::invalid_argument("jax_ring: an operand of " + std::to_string(operand) + " elements does not match its " +
                              "result of " + std::to_string(result) + ": with order 'tree' the operand has " +
                              std::to_string(slots) + " partial sums and the result " + std::to_string(results) +
                              ", in a group of " + std::to_string(group_size) + " ranks");
}

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(ffi::ThreadPool& pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

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
    ffi::Span<const int64_t> tree_ranks, std::string_view call, std::string_view lines, std::string_view program) {
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
    site->trees = trees_of(plan, group_sizes, tree_shards, tree_sizes, tree_ranks);
    if (!program.empty()) {
      site->hash =
          identity_of(call, program, plan, site->op, site->algorithm, {sources, tree_shards, tree_sizes, tree_ranks});
    }
    find_communicators(*site, partitions, processes, group_sizes, one_shot_bytes, two_shot_bytes);
    record(*site, collective, partitions, processes, group_sizes);
    return site;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

void run_between_processes(const CallSite& site, const CrossProcessGroup& group, RendezvousPtr rendezvous,
                           const Message& message) {
  const auto [run, launch] = group.launch_ids->get(rendezvous->run_id);
  const bool one_shot = is_one_shot(site, message, group.thresholds);
  Hash hash = site.hash;
  hash.add(run).add(launch).add(message.dtype).add(one_shot);
  for (size_t count : message.counts) hash.add(count);
  rendezvous->entry.identify(hash.value());
  rendezvous = group.communicator->submit({std::move(rendezvous), message, hash.value(), one_shot, site.text});
  if (rendezvous == nullptr) return;
  const auto has_completion = [](const Completion& done) { return static_cast<bool>(done); };
  if (std::count_if(rendezvous->done.begin(), rendezvous->done.end(), has_completion) > 1) {
    return CompletionThreads::instance().complete(std::move(rendezvous));
  }
  // The only local rank is the caller, and nothing waits on its future yet: completing it here runs no other code.
  (*std::find_if(rendezvous->done.begin(), rendezvous->done.end(), has_completion))(nullptr);
}

void note_bytes(flight::RecordedCall& call, const Message& message) {
  if (call.bytes_per_rank.load(std::memory_order_relaxed) != 0) return;
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  call.bytes_per_rank.store(count * element_size(message.dtype), std::memory_order_relaxed);
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

// Adds the operands and results of a rank to what it contributes, and describes them in the message.
void decode(const CallSite& site, int group, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
            Participant& participant) {
  if (args.size() == 0 || args.size() != rets.size()) {
    throw std::invalid_argument("jax_ring: a call needs one result per operand, and at least one operand");
  }
  const EngineType type = engine_type_of(site.plan, args.get<ffi::AnyBuffer>(0)->element_type());
  message.dtype = type.dtype;
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
    ffi::AnyBuffer output = **rets.get<ffi::AnyBuffer>(i);
    const size_t count = count_of(site, group, input.element_count(), output.element_count());
    message.counts.push_back(count * type.per_xla_element);
    participant.inputs.push_back(input.untyped_data());
    participant.outputs.push_back(output.untyped_data());
  }
}

// The same for a ragged all-to-all, whose result starts as a copy of the last operand.
void decode_ragged(const CallSite& site, int group, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
                   Participant& participant) {
  if (args.size() != 3 || rets.size() != 1) {
    throw std::invalid_argument("jax_ring: a ragged all-to-all has a table, an operand, an output and a result");
  }
  const ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(0), input = *args.get<ffi::AnyBuffer>(1),
                       before = *args.get<ffi::AnyBuffer>(2);
  ffi::AnyBuffer output = **rets.get<ffi::AnyBuffer>(0);
  const int num_ranks = site.rendezvous_map.groups().size(group);
  const size_t rows_of_table = 4 * static_cast<size_t>(num_ranks);
  const bool is_64_bit = table.element_type() == ffi::S64;
  if (!(is_64_bit || table.element_type() == ffi::S32) || table.element_count() % (rows_of_table * num_ranks) != 0 ||
      input.dimensions().size() == 0 || before.size_bytes() != output.size_bytes()) {
    throw std::invalid_argument("jax_ring: the table or the result of a ragged all-to-all does not fit its operands");
  }
  const size_t rows = input.dimensions()[0], result_rows = output.dimensions()[0];
  const size_t row_bytes = rows > 0 ? input.size_bytes() / rows : result_rows > 0 ? output.size_bytes() / result_rows : 0;
  const RaggedTable sizes{table.untyped_data(), is_64_bit, num_ranks, table.element_count() / rows_of_table};
  // All ranks have the same table, so that all fail if one does.
  message.slices = std::make_shared<std::vector<Part>>(slices_of(sizes, row_bytes, rows, result_rows));
  message.plan.slices = message.slices->data();
  message.plan.num_slices = static_cast<int>(message.slices->size());
  message.dtype = DType::u8;
  message.counts.push_back(input.size_bytes());
  participant.inputs.push_back(input.untyped_data());
  participant.outputs.push_back(output.untyped_data());
  if (before.untyped_data() != output.untyped_data() && output.size_bytes() > 0) {
    std::memcpy(output.untyped_data(), before.untyped_data(), output.size_bytes());
  }
}

ffi::Future execute(CallSite* site, ffi::RunId run, ffi::ThreadPool pool, ffi::BufferR0<ffi::U32> partition,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary /*seen by instantiate*/) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    const ReplicaGroups& groups = site->rendezvous_map.groups();
    const int group = groups.place(*partition.typed_data()).group;
    // Reused from call to call, so that their vectors keep their memory.
    thread_local Message message;
    thread_local Participant participant;
    message.plan = site->plan;
    message.op = site->op;
    message.tree = site->trees.of_group.empty() ? nullptr : &site->trees.of_group[group];
    message.num_results = site->trees.num_results;
    message.counts.clear();
    participant.inputs.clear();
    participant.outputs.clear();
    const bool is_ragged = site->plan.collective == Collective::ragged_all_to_all;
    (is_ragged ? decode_ragged : decode)(*site, group, args, rets, message, participant);
    if (site->recorded != nullptr) note_bytes(*site->recorded, message);
    participant.done = completion_of(promise);
    auto rendezvous = site->rendezvous_map.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (rendezvous == nullptr) return future;
    if (const std::optional<CrossProcessGroup>& cross_process = site->groups[group]) {
      run_between_processes(*site, *cross_process, std::move(rendezvous), message);
    } else {
      XlaWorkers workers(pool);
      run_collective(std::move(rendezvous), message, workers);
    }
  } catch (const std::invalid_argument& error) {
    promise.SetError(ffi::Error::InvalidArgument(*site->text + ": " + error.what()));
  } catch (const std::exception& error) {
    promise.SetError(ffi::Error::Internal(error.what()));
  }
  return future;
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
