// module.cc: the Python module `_ffi_cpu`: the handlers as capsules, and the engine's options.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/call_failure.h"
#include "base/cores.h"
#include "collective/options.h"
#include "collective/schedule.h"
#include "cpu/fold/fold_kernels.h"
#include "cpu/fold/fold_limit.h"
#include "cpu/rendezvous/watchdog.h"
#include "cpu/waiting/core_costs.h"
#include "cpu/waiting/cores.h"
#include "recorder/flight_recorder.h"
#include "recorder/flight_table.h"
#include "shm/group/communicators.h"
#include "shm/peers/departures.h"
#include "xla_cpu/calls_of_xla.h"
#include "xla_cpu/handler.h"
#include "xla_cpu/python_lock.h"
#include "xla_cpu/running_frames.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using jax_ring::CallFailure;

template <class T>
nb::capsule capsule_of(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

// The dtype with this name in collective/fold.h.
jax_ring::DType dtype_named(const std::string& name) {
#define JAX_RING_COMPARE(dtype, element) \
  if (name == #dtype) return jax_ring::DType::dtype;
  JAX_RING_FOR_EACH_DTYPE(JAX_RING_COMPARE)
#undef JAX_RING_COMPARE
  throw std::invalid_argument("jax_ring has no dtype named " + name);
}

// (chunk, hop) at each step that is not idle.
std::vector<std::pair<uint64_t, int>> ring_hops(bool rank_order, int num_ranks, int rank, uint64_t num_chunks,
                                                uint64_t lag) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument("there is no rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
  }
  const jax_ring::Order order = rank_order ? jax_ring::Order::rank : jax_ring::Order::ring;
  const jax_ring::RingSchedule schedule{order, num_ranks, rank, num_chunks, lag};
  std::vector<std::pair<uint64_t, int>> hops;
  for (uint64_t step = 0; step < schedule.num_steps(); ++step) {
    const jax_ring::Hop hop = schedule.step(step);
    if (hop.exists()) hops.emplace_back(hop.chunk, hop.index);
  }
  return hops;
}

using CallTotals =
    std::tuple<std::string, std::string, uint64_t, std::vector<std::vector<int64_t>>, std::vector<std::vector<int64_t>>,
               uint64_t, uint64_t, double, double, std::vector<std::pair<uint64_t, double>>>;

std::vector<CallTotals> call_statistics(bool reset) {
  std::vector<CallTotals> all;
  for (jax_ring::flight::RecordedCall* call : jax_ring::flight::Recorder::instance().calls()) {
    const auto totals = call->statistics->read(reset);
    std::vector<std::vector<int64_t>> positions, processes;
    for (const auto& group : call->groups) {
      positions.push_back(group.positions);
      processes.push_back(group.processes);
    }
    std::vector<std::pair<uint64_t, double>> late;
    for (const auto& of_member : totals.late) late.emplace_back(of_member.count, of_member.nanoseconds * 1e-9);
    all.emplace_back(call->text, call->collective, totals.bytes, std::move(positions), std::move(processes),
                     totals.count, totals.failures, totals.waited * 1e-9, totals.busy * 1e-9, std::move(late));
  }
  return all;
}

using RecordedProcess = std::tuple<int64_t, int64_t, uint64_t, std::vector<nb::dict>>;

// pid: 0 if unknown.
RecordedProcess records_of(int64_t pid, const jax_ring::flight::Snapshot& snapshot, int64_t now) {
  constexpr const char* kStates[] = {"arriving", "ready", "done", "failed"};
  std::vector<nb::dict> records;
  for (const jax_ring::flight::Seen& seen : snapshot.records) {
    nb::dict record;
    const auto ago = [now](int64_t time) -> nb::object {
      return time == 0 ? nb::none() : nb::object(nb::float_(static_cast<double>(now - time) * 1e-9));
    };
    record["sequence"] = seen.sequence;
    record["id"] = seen.id;
    record["call"] = seen.text;
    record["group"] = seen.group;
    record["state"] = kStates[static_cast<size_t>(seen.state) % 4];
    record["entered_ago"] = ago(seen.entered);
    record["ready_ago"] = ago(seen.ready);
    record["ended_ago"] = ago(seen.ended);
    record["arrived"] = seen.arrived;
    record["last"] = seen.last;
    records.push_back(std::move(record));
  }
  return {pid, snapshot.process, snapshot.job, std::move(records)};
}

void bind_flight_recorder(nb::module_& m) {
  using jax_ring::flight::Recorder;

  m.def(
      "turn_off_recorder", [] { Recorder::instance().turn_off(); },
      "Stops recording, for the calls of programs that are loaded afterwards.");

  m.def(
      "leave_parents_recorder", [] { Recorder::instance().leave_parent(); },
      "For a child that has just been forked: it no longer shares its parent's records.");

  m.def("is_recording", [] { return Recorder::instance().is_on(); }, "Whether the flight recorder is on.");

  m.def(
      "flight_records",
      [] {
        const int64_t now = jax_ring::flight::nanoseconds_now();
        std::vector<RecordedProcess> processes;
        for (const auto& snapshot : Recorder::instance().read()) processes.push_back(records_of(0, snapshot, now));
        return processes;
      },
      "The records of this process, then of its peers: (pid, process, job, records), the oldest record first.");

  m.def(
      "flight_table", [] { return jax_ring::flight::table_of_everything(); },
      "The last calls of this process and its peers, side by side.");

  m.def("flight_tables_of_host", &jax_ring::flight::tables_of_host, "of_all_users"_a,
        "The last calls of processes on this host, this user's or all that it may read: (user, pids, table) of each "
        "job.");

  m.def("call_statistics", &call_statistics, "reset"_a,
        "For each call: text, collective, bytes of a rank's operands, mesh positions and processes by group, count, "
        "failures, "
        "seconds waited, seconds busy, and by member how often it came last, and by how many seconds.");
}

constexpr const char* kKindNames[] = {"deadline", "mismatch",  "absent",   "stopped", "left", "ended",
                                      "aborted",  "resources", "released", "overlap", "other"};
static_assert(std::size(kKindNames) == static_cast<size_t>(CallFailure::Kind::count));

const char* name_of(jax_ring::ErrorCode code) {
  switch (code) {
    case jax_ring::ErrorCode::invalid_argument:
      return "INVALID_ARGUMENT";
    case jax_ring::ErrorCode::deadline_exceeded:
      return "DEADLINE_EXCEEDED";
    case jax_ring::ErrorCode::resource_exhausted:
      return "RESOURCE_EXHAUSTED";
    case jax_ring::ErrorCode::failed_precondition:
      return "FAILED_PRECONDITION";
    case jax_ring::ErrorCode::internal:
      break;
  }
  return "INTERNAL";
}

std::optional<int64_t> optional_of(int64_t number) {
  return number == CallFailure::kNone ? std::nullopt : std::optional(number);
}

using FailureFields = std::tuple<int64_t, std::string, std::string, std::optional<int64_t>, std::optional<int64_t>,
                                 std::string, std::string>;

std::optional<FailureFields> failure(int64_t number) {
  const jax_ring::CallFailurePtr found = jax_ring::CallFailures::instance().find(number);
  if (found == nullptr) return std::nullopt;
  return FailureFields(found->number, name_of(found->code), kKindNames[static_cast<size_t>(found->kind)],
                       optional_of(found->process), optional_of(found->rank), found->cause, found->text);
}

// The announcement of a leaving process. kind, process, rank: of the failure that makes it leave.
CallFailure departure(const std::string& cause, const std::string& kind, std::optional<int64_t> process,
                      std::optional<int64_t> rank) {
  CallFailure told = CallFailure::departure(cause);
  const auto found = std::find(std::begin(kKindNames), std::end(kKindNames), kind);
  if (found == std::end(kKindNames)) throw std::invalid_argument("no failure is of the kind " + kind);
  told.kind = static_cast<CallFailure::Kind>(found - std::begin(kKindNames));
  told.process = process.value_or(CallFailure::kNone);
  told.rank = rank.value_or(CallFailure::kNone);
  return told;
}

// (seconds since its start, text, processes) of each call.
std::vector<std::tuple<double, std::string, std::vector<int64_t>>> ages_of(
    std::vector<jax_ring::cpu::CallOfXla> calls) {
  const auto now = std::chrono::steady_clock::now();
  std::vector<std::tuple<double, std::string, std::vector<int64_t>>> ages;
  for (auto& call : calls) {
    const std::chrono::duration<double> age = now - call.begin;
    ages.emplace_back(age.count(), std::move(call.text), std::move(call.processes));
  }
  return ages;
}

}  // namespace

NB_MODULE(_ffi_cpu, m) {
  m.doc() = "The CPU engine of jax_ring: XLA FFI handlers and their options.";

  jax_ring::cpu::Watchdog::instance().set_launch_lock(jax_ring::cpu::python_lock());

  m.def(
      "collective_handlers",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> stages;
        stages["instantiate"] = capsule_of(&jax_ring::cpu::collective_instantiate);
        stages["execute"] = capsule_of(&jax_ring::cpu::collective_execute);
        return stages;
      },
      "The handlers of the custom calls, one capsule per stage, for jax.ffi.register_ffi_target.");

  m.def(
      "barrier_handlers",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> stages;
        stages["instantiate"] = capsule_of(&jax_ring::cpu::barrier_instantiate);
        stages["execute"] = capsule_of(&jax_ring::cpu::barrier_execute);
        return stages;
      },
      "The handlers of the barrier, one capsule per stage, for jax.ffi.register_ffi_target.");

  m.def(
      "between_hosts_handlers",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> stages;
        stages["execute"] = capsule_of(&jax_ring::cpu::between_hosts_execute);
        return stages;
      },
      "The handler of the notes around XLA's collectives, one capsule per stage, for jax.ffi.register_ffi_target.");

  m.def(
      "calls_of_xla", [] { return ages_of(jax_ring::cpu::CallsOfXla::instance().open()); },
      "The calls that wait in XLA's collectives: (seconds so far, text, processes) of each.");

  m.def(
      "take_calls_of_xla", [] { return ages_of(jax_ring::cpu::CallsOfXla::instance().take()); },
      "The same, and forgets them.");

  m.def(
      "count_builds", [](int change) { jax_ring::shm::Communicators::instance().count_builds(change); }, "change"_a,
      "1 when a program begins to be compiled or loaded, -1 when it has been.");

  m.def(
      "call_site_type",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> type;
        type["type_id"] = capsule_of(jax_ring::cpu::call_site_type_id());
        type["type_info"] = capsule_of(jax_ring::cpu::call_site_type_info());
        return type;
      },
      "The type of the handlers' state, for jax.ffi.register_ffi_type.");

  m.def("fingerprint", [] { return JAX_RING_FINGERPRINT; }, "The fingerprint of the sources that this was built from.");

  m.def(
      "set_deadline", [](double seconds) { jax_ring::cpu::Watchdog::instance().set_deadline(seconds); }, "seconds"_a,
      "Sets how many seconds a call waits for missing ranks.");

  m.def(
      "say_that_launches_hold_threads", [] { jax_ring::cpu::Watchdog::instance().say_that_launches_hold_threads(); },
      "Errors of missing ranks name what to do where launches hold the threads that these need.");

  m.def(
      "deadline", [] { return jax_ring::cpu::Watchdog::instance().deadline(); },
      "The seconds that a call waits for missing ranks.");

  m.def(
      "join",
      [](int64_t process, const std::string& label, const nb::bytes& key) {
        const std::string own(key.c_str(), key.size());
        const nb::gil_scoped_release released;
        jax_ring::shm::Communicators::instance().join(process, label, own);
        jax_ring::flight::Recorder::instance().join(process, label);
      },
      "process"_a, "label"_a, "key"_a,
      "Sets the id of this process among those that share the key of 16 bytes. The names of their shared memory begin "
      "with the label, and nobody can work them out without the key.");

  bind_flight_recorder(m);

  m.def(
      "abort_groups",
      [](const std::string& cause, const std::string& kind, std::optional<int64_t> process,
         std::optional<int64_t> rank) {
        jax_ring::shm::Communicators::instance().abort(departure(cause, kind, process, rank));
      },
      "cause"_a, "kind"_a, "process"_a = nb::none(), "rank"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
      "Fails all calls between processes, now and in future, here and in the other processes of the groups, which hear "
      "how this process has left.");

  m.def("failure", &failure, "number"_a,
        "(number, code, kind, process, rank, cause, text) of a failure of this process; None if it is not kept.");

  m.def(
      "failures", [] { return nb::capsule(&jax_ring::CallFailures::instance(), jax_ring::CallFailures::kCapsule); },
      "The failures of this process, for the module of the CUDA engine.");

  m.def(
      "reset_groups", [] { jax_ring::shm::Communicators::instance().reset(); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Gives up all groups, and forgets them and the key, so that `join` starts afresh. Programs that were compiled "
      "before fail.");

  m.def(
      "has_groups", [] { return jax_ring::shm::Communicators::instance().has_groups(); },
      "Whether this process has had a group with other processes since it joined them.");

  m.def(
      "await_questions", [](double seconds) { return jax_ring::shm::Departures::instance().await_questions(seconds); },
      "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
      "The processes that a call waits for and that share no memory with this one, so that someone has to find out "
      "whether they have left. Waits for up to so many seconds.");

  m.def(
      "end_questions", [] { jax_ring::shm::Departures::instance().end_questions(); },
      "Ends the waits of await_questions, now and in future.");

  m.def(
      "note_departure",
      [](int64_t process, const std::string& cause, const std::string& kind, std::optional<int64_t> by,
         std::optional<int64_t> rank) {
        jax_ring::shm::Departures::instance().note(process, departure(cause, kind, by, rank));
      },
      "process"_a, "cause"_a, "kind"_a, "by"_a = nb::none(), "rank"_a = nb::none(), "Notes how a process has left.");

  m.def(
      "fold_limit_seconds",
      [](int num_ranks, size_t num_bytes, int num_threads, int repeats, const std::string& dtype) {
        return jax_ring::cpu::fold_limit_seconds(num_ranks, num_bytes, num_threads, repeats, dtype_named(dtype));
      },
      "num_ranks"_a, "num_bytes"_a, "num_threads"_a, "repeats"_a, "dtype"_a = "f32",
      nb::call_guard<nb::gil_scoped_release>(),
      "Seconds that plain threads need to sum `num_ranks` buffers of `num_bytes` each in place. dtype: f32, bf16, s8, "
      "f8e4m3fn, ...");

  m.def(
      "core_costs",
      [] {
        const jax_ring::cpu::CoreCosts costs = jax_ring::cpu::core_costs();
        return std::make_pair(costs.round_trip, costs.context_switch);
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Seconds in which a cache line goes to another core and back (not a number where there is one), and of a context "
      "switch.");

  m.def(
      "spreads_ranks",
      [](int num_ranks) { return jax_ring::cpu::Spread(jax_ring::usable_cores()).applies_to(num_ranks); },
      "num_ranks"_a, "Whether so many ranks that wait on a pool are moved to other cores, so that each has its share.");

  m.def("ring_hops", &ring_hops, "rank_order"_a, "num_ranks"_a, "rank"_a, "num_chunks"_a, "lag"_a,
        "The (chunk, hop) that a rank of the native ring handles at each step, in order.");

  m.def(
      "default_thresholds",
      [](int num_ranks) {
        const jax_ring::Thresholds thresholds = jax_ring::default_thresholds(num_ranks);
        return std::make_pair(thresholds.one_shot, thresholds.two_shot);
      },
      "num_ranks"_a,
      "The default thresholds: the largest messages of a rank, in bytes, for one_shot and for two_shot.");

  m.def(
      "choose",
      [](uint64_t num_bytes, uint64_t one_shot, uint64_t two_shot) {
        constexpr const char* kNames[] = {"one_shot", "two_shot", "ring"};
        return std::string(kNames[static_cast<int>(jax_ring::choose(num_bytes, {one_shot, two_shot}))]);
      },
      "num_bytes"_a, "one_shot"_a, "two_shot"_a, "The algorithm of an all-reduce with these thresholds.");

  m.def("running_frames", &jax_ring::running_frames,
        nb::sig("def running_frames() -> list[tuple[int, types.CodeType, int]]"),
        "Of all threads, at one moment: the id of each frame, its code and the index of its instruction.");

  m.def(
      "instruction_set", [] { return std::string(jax_ring::cpu::fold_kernels().instruction_set); },
      "The instruction set of the fold kernels in use: baseline, avx2 or avx512.");
}
