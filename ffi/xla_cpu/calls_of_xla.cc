// calls_of_xla.cc: records when a call's XLA collectives begin and end.
#include "xla_cpu/calls_of_xla.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "attributes/operands.h"
#include "base/describe.h"
#include "base/printable.h"

namespace jax_ring::cpu {

CallsOfXla& CallsOfXla::instance() {
  // Never destroyed: XLA's threads may outlive main.
  static CallsOfXla* const calls = new CallsOfXla;
  return *calls;
}

void CallsOfXla::begin(CallOfXla call) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Calls of one execution may overlap. If a call of an earlier execution of this rank is still here, it has failed,
  // unless the executions overlap too: then its end finds no entry, which does no harm.
  const auto is_stale = [&](const CallOfXla& other) {
    return other.partition == call.partition && other.run_id != call.run_id && other.call == call.call;
  };
  calls_.erase(std::remove_if(calls_.begin(), calls_.end(), is_stale), calls_.end());
  calls_.push_back(std::move(call));
}

void CallsOfXla::end(int64_t run_id, int64_t partition, std::string_view name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(calls_.begin(), calls_.end(), [&](const CallOfXla& call) {
    return call.run_id == run_id && call.partition == partition && call.call == name;
  });
  if (found != calls_.end()) calls_.erase(found);
}

std::vector<CallOfXla> CallsOfXla::open() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

std::vector<CallOfXla> CallsOfXla::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(calls_, {});
}

namespace {

namespace ffi = xla::ffi;

// The processes of a rank's group.
std::vector<int64_t> processes_with(int64_t partition, ffi::Span<const int64_t> members,
                                    ffi::Span<const int64_t> processes, ffi::Span<const int64_t> group_sizes) {
  size_t begin = 0;
  for (const int64_t size : group_sizes) {
    const size_t left = std::min(members.size(), processes.size()) - begin;
    if (size < 0 || static_cast<size_t>(size) > left) {
      throw std::invalid_argument("a group of " + std::to_string(size) + " of the " + std::to_string(left) +
                                  " members that are left");
    }
    const size_t end = begin + static_cast<size_t>(size);
    const auto* const last = members.begin() + end;
    if (std::find(members.begin() + begin, last, partition) != last) {
      return {processes.begin() + begin, processes.begin() + end};
    }
    begin = end;
  }
  return {};
}

ffi::Error execute(ffi::RunId run, ffi::BufferR0<ffi::U32> partition, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t begins, std::string_view call, std::string_view site, ffi::Span<const int64_t> members,
                   ffi::Span<const int64_t> processes, ffi::Span<const int64_t> group_sizes) {
  const int64_t rank = *partition.typed_data();
  try {
    copy_operands(args, rets);
    if (begins != 0) {
      CallsOfXla::instance().begin({run.run_id, rank, std::string(call), describe(call, site),
                                    processes_with(rank, members, processes, group_sizes),
                                    std::chrono::steady_clock::now()});
    } else {
      CallsOfXla::instance().end(run.run_id, rank, call);
    }
  } catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(printable(std::string(call) + ": " + error.what()));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("begins")
                           .Attr<std::string_view>("call")
                           .Attr<std::string_view>("site")
                           .Attr<ffi::Span<const int64_t>>("members")
                           .Attr<ffi::Span<const int64_t>>("processes")
                           .Attr<ffi::Span<const int64_t>>("group_sizes"));

}  // namespace

XLA_FFI_Error* between_hosts_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

}  // namespace jax_ring::cpu
