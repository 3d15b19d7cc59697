// call_site.cc: the stage `instantiate` of the custom calls: finds the participants of a call.
#include "xla_cpu/call_site.h"

#include <exception>
#include <string_view>
#include <utility>

#include "xla_cpu/handler.h"

namespace jax_ring::cpu {

namespace ffi = xla::ffi;

ffi::TypeId CallSite::id = {};
std::atomic<uint64_t> CallSite::next_number{1};

namespace {

std::vector<bool> are_local(const std::vector<int64_t>& processes) {
  std::vector<bool> local;
  for (int64_t process : processes) local.push_back(process == shm::Communicators::instance().process());
  return local;
}

// Equal calls of a program are told apart by the order in which a process builds them. The program's name is the same
// in all processes up to its '#'.
Hash identity_of(const Attributes& call) {
  Hash hash = call.hash;
  if (call.program.empty()) return hash;
  hash.add(std::string_view(call.program).substr(0, call.program.rfind('#')));
  return hash.add(shm::Communicators::instance().next_index(call.program + ": " + std::to_string(hash.value())));
}

void find_communicators(CallSite& site) {
  auto& all = shm::Communicators::instance();
  const int64_t self = all.process();
  size_t next = 0;
  for (size_t group = 0; group < site.call.group_sizes.size(); ++group) {
    std::vector<shm::Member> members;
    Hash hash = site.hash;
    size_t local = 0;
    for (const size_t end = next + site.call.group_sizes[group]; next < end; ++next) {
      members.emplace_back(site.call.processes[next], site.call.members[next]);
      hash.add(members.back().first).add(members.back().second);
      local += members.back().first == self;
    }
    site.groups.emplace_back();
    if (local == 0 || local == members.size()) continue;
    site.groups.back() = {all.get_or_create(members), site.call.thresholds_of(group),
                          std::make_unique<shm::LaunchIds>(all.run_counter(hash.value()))};
  }
}

void record(CallSite& site) {
  std::vector<flight::Members> groups;
  auto member = site.call.members.begin(), process = site.call.processes.begin();
  for (int64_t size : site.call.group_sizes) {
    groups.push_back({{member, member + size}, {process, process + size}});
    member += size;
    process += size;
  }
  auto& recorder = flight::Recorder::instance();
  const auto collective = kCollectives[static_cast<size_t>(site.call.plan.collective)];
  site.recorded = recorder.add(site.call.text, collective, std::move(groups));
  site.rendezvous_map.record(site.recorded, recorder.memory());
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  try {
    auto site = std::make_unique<CallSite>(attributes_of(attributes));
    site->hash = identity_of(site->call);
    find_communicators(*site);
    record(*site);
    return site;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

// A barrier of this process's ranks. It has the state type of a call, to need only one FFI type.
ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_barrier(ffi::Span<const int64_t> members,
                                                            ffi::Span<const int64_t> processes) {
  try {
    Attributes all;
    all.members = {members.begin(), members.end()};
    all.processes = {processes.begin(), processes.end()};
    all.group_sizes = {static_cast<int64_t>(members.size())};
    check_groups(all, 0);
    return std::make_unique<CallSite>(std::move(all));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    instantiate_barrier_handler, instantiate_barrier,
    ffi::Ffi::BindInstantiate().Attr<ffi::Span<const int64_t>>("members").Attr<ffi::Span<const int64_t>>("processes"));

}  // namespace

CallSite::CallSite(Attributes attributes)
    : call(std::move(attributes)),
      rendezvous_map(ReplicaGroups(call.members, call.group_sizes, are_local(call.processes)), call.text),
      text(std::make_shared<std::string>(call.text)) {}

XLA_FFI_Error* barrier_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_barrier_handler(call_frame); }
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

XLA_FFI_TypeInfo* call_site_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_ring::cpu
