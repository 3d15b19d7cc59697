// handler.cc: takes a custom call to the rendezvous and the engine, at each execution.
#include "xla_cpu/handler.h"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attributes/xla_error.h"
#include "base/call_failure.h"
#include "base/hash.h"
#include "cpu/engine.h"
#include "cpu/fold/float_mode.h"
#include "cpu/huge_pages.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "recorder/flight_recorder.h"
#include "shm/group/communicators.h"
#include "xla_cpu/call_site.h"
#include "xla_cpu/decode.h"
#include "xla_cpu/future.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

// Whether this thread is known to belong to the runtime's pool.
thread_local bool is_of_pool = false;

bool is_one_shot(const CallSite& site, const Message& message, const Thresholds& thresholds) {
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  const Algorithm chosen = choose(count * element_size(message.dtype), thresholds);
  return site.call.algorithm.value_or(chosen) == Algorithm::one_shot;
}

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(ffi::ThreadPool& pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Whether more parts of the all-gather's array follow. They cross hosts meanwhile.
bool is_followed(const CallSite& site, ffi::RemainingRets rets) {
  const std::optional<Range>& part = site.call.part;
  if (!part || site.call.plan.collective != Collective::all_gather) return false;
  return part->begin + part->count < (**rets.get<ffi::AnyBuffer>(0)).element_count();
}

// The parts of an array are gathered into one result, mostly in fresh memory. Page faults would take time from XLA's
// copies and additions of data that crosses hosts.
void prepare_result(const CallSite& site, ffi::RemainingRets rets) {
  const std::optional<Range>& part = site.call.part;
  if (!part || site.call.plan.collective != Collective::all_gather || part->begin > 0) return;
  ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(0);
  advise_huge_pages(result.untyped_data(), result.size_bytes());
}

// The other processes' key for a call that a loop repeats, the same throughout one execution.
struct Identity {
  uint64_t site = 0;
  int group = 0;
  int64_t run_id = 0;
  uint64_t id = 0;
  bool one_shot = false;
};

Identity identity_of(const CallSite& site, int group, int64_t run_id, const Message& message) {
  const CrossProcessGroup& processes = *site.groups[group];
  const auto [index, skipped] = processes.launch_ids->get(run_id);
  const bool one_shot = is_one_shot(site, message, processes.thresholds);
  Hash hash = site.hash;
  hash.add(index).add(skipped).add(message.dtype).add(one_shot);
  for (size_t count : message.counts) hash.add(count);
  return {site.number, group, run_id, hash.value(), one_shot};
}

// A thread's cache from one call to the next, so that a loop of small calls neither allocates memory nor repeats
// lookups.
struct Kept {
  Participant participant;
  shm::Call call;
  Identity identity;  // of the last call between processes
  UnusedFuture future;
  RendezvousPtr rendezvous;  // of the last call that was done at once
  WaitingRankPtr waiting = std::make_shared<WaitingRank>();
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

// Of a rank's operands.
uint64_t bytes_of(const Message& message) {
  size_t count = 0;
  for (size_t of_operand : message.counts) count += of_operand;
  return count * message.operand_element_bytes();
}

// The completion may run on another thread, and the rank's program must compute there as it would have here.
Completion completion_of(Future future) {
  return [future, mode = FloatMode::current()](const CallFailure* failure) {
    const ScopedFloatMode as_before(mode);
    future.set(failure);
  };
}

// Whether a rank may wait in its call. Calls between processes have their own way, and parts of an array are summed
// while others cross hosts.
bool may_wait(const CallSite& site, int group) { return !site.groups[group].has_value() && !site.call.part; }

// Sets how this thread's rank may wait.
void offer_to_wait(Kept& kept, const CallSite& site, int group, const ffi::ThreadPool& pool) {
  if (!kept.waiting->is_free()) kept.waiting = std::make_shared<WaitingRank>();
  kept.waiting->skip();
  Participant& participant = kept.participant;
  participant.waiting = may_wait(site, group) ? &kept.waiting : nullptr;
  participant.thread = {CompletionThreads::may_wait(), is_of_pool,
                        pool.num_threads() >= site.rendezvous_map.groups().num_local()};
}

// The rank waits on a pool thread, and goes on there. Terminates the process if there is no memory for the task: by now
// the others count on this rank.
void wait_on_pool(ffi::ThreadPool& pool, WaitingRankPtr waiting, Future future) noexcept {
  // Shared, because a std::function must be copyable.
  auto done = std::make_shared<Completion>(completion_of(future));
  pool.Schedule([waiting = std::move(waiting), done = std::move(done), caller = std::this_thread::get_id()] {
    // A pool with a full queue runs a task at once, on the scheduling thread. The rank is then completed.
    if (std::this_thread::get_id() == caller) return;
    is_of_pool = true;
    if (waiting->wait()) (*done)(nullptr);
  });
}

// Runs the call of a group within this process, after all its ranks have arrived.
void run_within_process(const CallSite& site, RendezvousPtr rendezvous, const Message& message, ffi::ThreadPool& pool,
                        ffi::RemainingRets rets) {
  // The next part crosses hosts, and the links must not wait.
  if (is_followed(site, rets)) return run_collective_beside(std::move(rendezvous), message);
  XlaWorkers workers(pool);
  run_collective(std::move(rendezvous), message, workers);
}

Result execute(Api api, CallSite* site, ffi::RunId run, ffi::ThreadPool pool, ffi::BufferR0<ffi::U32> partition,
               ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary /*seen by instantiate*/) {
  thread_local Kept kept;
  const Future future = kept.future.take_or_create(api.functions);
  const auto done_at_once = [&] {
    kept.future.keep(future);
    return Result{};
  };
  try {
    const ReplicaGroups& groups = site->rendezvous_map.groups();
    const int group = groups.place(*partition.typed_data()).group;
    Message& message = kept.call.message;
    Participant& participant = kept.participant;
    message.plan = site->call.plan;
    message.op = site->call.op;
    message.tree = site->call.trees.of_group.empty() ? nullptr : &site->call.trees.of_group[group];
    message.num_results = site->call.trees.num_results;
    message.counts.clear();
    message.slices = nullptr;
    message.blocks_apart = false;
    message.conversion = {};
    participant.inputs.clear();
    participant.outputs.clear();
    decode(site->call, group, args, rets, message, participant);
    const bool is_within = message.conversion.kernel != nullptr || message.blocks_apart;
    if (is_within && site->groups[group].has_value()) {
      throw std::invalid_argument("parts are converted, and blocks are apart, within one process only");
    }
    prepare_result(*site, rets);
    participant.done = completion_of(future);
    offer_to_wait(kept, *site, group, pool);
    const bool is_alone = groups.num_local(group) == 1;
    auto& map = site->rendezvous_map;
    RendezvousPtr rendezvous = is_alone ? map.arrive_alone(run.run_id, *partition.typed_data(), std::move(participant),
                                                           std::move(kept.rendezvous))
                                        : map.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (rendezvous != nullptr) rendezvous->entry.note_bytes(bytes_of(message));
    if (!site->groups[group].has_value()) {
      const bool moves = kept.waiting->moves();
      if (moves) wait_on_pool(pool, std::exchange(kept.waiting, std::make_shared<WaitingRank>()), future);
      if (rendezvous != nullptr) run_within_process(*site, std::move(rendezvous), message, pool, rets);
      return moves || !kept.waiting->wait() ? Result{future.get()} : done_at_once();
    }
    if (rendezvous == nullptr) return {future.get()};
    rendezvous = run_between_processes(*site, std::move(rendezvous), kept);
    if (rendezvous == nullptr) return {future.get()};
    if (is_alone) {
      rendezvous->clear();
      kept.rendezvous = std::move(rendezvous);
      return done_at_once();
    }
    CompletionThreads::instance().complete(std::move(rendezvous));
  } catch (const std::invalid_argument& error) {
    future.set_error(new_error(ErrorCode::invalid_argument, *site->text + ": " + error.what()));
  } catch (const std::exception& error) {
    future.set_error(new_error(ErrorCode::internal, error.what()));
  }
  return {future.get()};
}

Result execute_barrier(Api api, CallSite* site, ffi::RunId run, ffi::BufferR0<ffi::U32> partition,
                       ffi::RemainingArgs /*awaited*/, ffi::Dictionary /*seen by instantiate_barrier*/) {
  const Future future = Future::create(api.functions);
  try {
    Participant participant;
    participant.done = completion_of(future);
    auto rendezvous = site->rendezvous_map.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (rendezvous != nullptr) CompletionThreads::instance().complete(std::move(rendezvous));
  } catch (const std::exception& error) {
    future.set_error(new_error(ErrorCode::internal, error.what()));
  }
  return {future.get()};
}

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<Api>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(execute_barrier_handler, execute_barrier,
                       ffi::Ffi::Bind()
                           .Ctx<Api>()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .Attrs());

}  // namespace

XLA_FFI_Error* barrier_execute(XLA_FFI_CallFrame* call_frame) { return execute_barrier_handler(call_frame); }

XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

}  // namespace jax_ring::cpu
