// call_site.cc: the stage `instantiate` of the custom calls, which decodes and checks the attributes.
#include "xla_cpu/call_site.h"

#include <initializer_list>
#include <stdexcept>
#include <string_view>

#include "attributes/xla_types.h"
#include "base/describe.h"
#include "xla_cpu/handler.h"

namespace jax_ring::cpu {

namespace ffi = xla::ffi;

ffi::TypeId CallSite::id = {};
std::atomic<uint64_t> CallSite::next_number{1};

namespace {

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

ffi::DataType rounds_to_of(std::string_view name) {
  if (name.empty()) return ffi::DataType::INVALID;
  if (name == "bfloat16") return ffi::BF16;
  if (name == "float16") return ffi::F16;
  throw std::invalid_argument("jax_ring: no part is rounded to " + std::string(name));
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(
    std::string_view collective, std::string_view op, int64_t root, ffi::Span<const int64_t> sources,
    std::string_view algorithm, std::string_view order, ffi::Span<const int64_t> partitions,
    ffi::Span<const int64_t> processes, ffi::Span<const int64_t> group_sizes, ffi::Span<const int64_t> one_shot_bytes,
    ffi::Span<const int64_t> two_shot_bytes, ffi::Span<const int64_t> tree_shards, ffi::Span<const int64_t> tree_sizes,
    ffi::Span<const int64_t> tree_ranks, ffi::Span<const int64_t> part, std::string_view rounds_to,
    std::string_view call, std::string_view lines, std::string_view program) {
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
    site->rounds_to = rounds_to_of(rounds_to);
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
                           .Attr<std::string_view>("rounds_to")
                           .Attr<std::string_view>("call")
                           .Attr<std::string_view>("site")
                           .Attr<std::string_view>("program"));

XLA_FFI_DEFINE_HANDLER(instantiate_barrier_handler, instantiate_barrier,
                       ffi::Ffi::BindInstantiate()
                           .Attr<ffi::Span<const int64_t>>("partitions")
                           .Attr<ffi::Span<const int64_t>>("processes"));

}  // namespace

XLA_FFI_Error* barrier_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_barrier_handler(call_frame); }
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

XLA_FFI_TypeInfo* call_site_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_ring::cpu
