// handler.cc: the stages of the custom call: decodes and checks it, connects its group, launches its kernels.
#include "cuda/launch/handler.h"

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attributes/attributes.h"
#include "attributes/operands.h"
#include "attributes/xla_error.h"
#include "cuda/groups/communicators.h"
#include "cuda/groups/watcher.h"
#include "cuda/launch/first_run.h"
#include "cuda/launch/instance.h"
#include "cuda/launch/plan.h"

namespace jax_ring::gpu {
namespace {

namespace ffi = xla::ffi;

// ---- Instantiate ----------------------------------------------------------------------------------------------------

// Compiles for GPUs that may be elsewhere: it touches no GPU and no store, and waits for nothing.
ffi::ErrorOr<std::unique_ptr<Instance>> instantiate(ffi::Dictionary attributes) {
  try {
    return instance_of(attributes_of(attributes));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::Internal(error.what()));
  }
}

// ---- Initialize -----------------------------------------------------------------------------------------------------

// Runs before every execution on every GPU. That includes replays of a CUDA graph, where the host sees nothing else.
//
// The driver can make an allocation, the loading of a kernel or the creation of a CUDA graph wait for a running kernel,
// and that kernel may wait for the very GPU that allocates. So XLA makes a process's ranks wait for each other around
// its own collectives, but not around custom calls. Here they do so themselves, in the first runs of a call:
// - before any GPU connects, every participating GPU of this process has launched all earlier programs, so that their
//   kernels end by themselves;
// - before any GPU leaves `initialize`, every one has connected and loaded all kernels;
// - in each group, before any GPU launches the call, XLA has initialized every GPU of this process for the whole
//   program, including its CUDA graphs; and before any goes on, every one has launched the call.
//
// That holds for calls that XLA launches itself: all calls of a program's first run. From the second run on, XLA may
// record a call in a CUDA graph while it initializes the GPU. It launches the graph without telling the engine, so a
// GPU may replay its graph while another GPU of this process still creates its own. If the driver makes that wait, the
// kernel's deadline ends it with an error. XLA_FLAGS=--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN keeps
// custom calls out of graphs.

// Builds the points where this process's GPUs wait for each other, in the first execution.
void find_ranks_of_this_process(Instance& instance) {
  const int64_t process = Communicators::instance().process();
  const std::lock_guard<std::mutex> lock(instance.mutex);
  if (instance.initialized != nullptr) return;
  std::vector<std::string> all;
  for (Instance::Group& group : instance.groups) {
    std::vector<std::string> names;
    for (const Member& member : group.members) {
      if (member.process == process) names.push_back(name_of(member));
    }
    if (names.empty()) continue;
    all.insert(all.end(), names.begin(), names.end());
    group.launching = std::make_unique<FirstRun>("ready to launch " + instance.call.text, names);
    group.launched = std::make_unique<FirstRun>("done with launching " + instance.call.text, names);
  }
  instance.initializing = std::make_unique<FirstRun>("ready to connect for " + instance.call.text, all);
  instance.initialized = std::make_unique<FirstRun>("connected for " + instance.call.text, all);
}

// This GPU's place in the call. Touches no GPU.
Instance::Rank find_rank(Instance& instance, int64_t id) {
  const Member self{Communicators::instance().process(), id};
  Instance::Rank found{nullptr, 0, 0, 0};
  for (Instance::Group& group : instance.groups) {
    found.local = 0;
    for (size_t rank = 0; rank < group.members.size(); ++rank) {
      if (group.members[rank].process != self.process) continue;
      if (group.members[rank] == self) {
        found.group = &group;
        found.rank = static_cast<int>(rank);
        return found;
      }
      ++found.local;
      ++found.index;
    }
  }
  std::vector<int64_t> devices;
  for (const Instance::Group& group : instance.groups) {
    for (const Member& member : group.members) devices.push_back(member.device);
  }
  throw std::runtime_error("this execution is on " + name_of(self) +
                           ", and the program was compiled for the GPUs with the ids " + list(devices));
}

// Connects this GPU's group, and publishes it to executions.
const Instance::Rank* connect(Instance& instance, Instance::Rank rank, int ordinal) {
  Communicators& all = Communicators::instance();
  std::shared_ptr<Communicator> communicator = all.get_or_create(rank.group->members);
  {
    // Replaces a group that was forgotten before this call ever ran. Later groups stay, since CUDA graphs refer to
    // them.
    const std::lock_guard<std::mutex> lock(instance.mutex);
    std::shared_ptr<Communicator>& own = rank.group->communicator;
    if (own == nullptr || (own->is_retired() && instance.ranks.empty())) own = communicator;
    communicator = own;
  }
  communicator->name_call(instance.site.fingerprint(), instance.call.text);
  all.connect(*communicator, instance.site.lane);
  start_reporting_failures();
  const std::lock_guard<std::mutex> lock(instance.mutex);
  instance.ranks.push_back(std::make_unique<const Instance::Rank>(rank));
  instance.rank_of[ordinal].store(instance.ranks.back().get(), std::memory_order_release);
  return instance.ranks.back().get();
}

// Why the group cannot make a call; null if it can.
CallFailurePtr failure_of(const Instance& instance, const Instance::Rank& rank) {
  Communicator& communicator = *rank.group->communicator;
  if (communicator.is_retired()) {
    return numbered(
        CallFailure::of(CallFailure::Kind::released,
                        instance.call.text +
                            ": this program was compiled before its group of GPUs was forgotten, by "
                            "jax_ring.runtime.forget_gpu_groups() or since jax.distributed was initialized again. Call "
                            "jax.clear_caches(), so that it is compiled again.",
                        ErrorCode::failed_precondition));
  }
  CallFailurePtr failure = communicator.call_failure(Communicators::instance().deadline());
  if (failure != nullptr) communicator.should_report();  // this error reports it
  return failure;
}

ffi::Error initialize(Instance* instance, ffi::RunId run, int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals) {
    return new_error(ErrorCode::internal, instance->call.text + ": the CUDA ordinal " + std::to_string(ordinal) +
                                              " is not below " + std::to_string(kMaxOrdinals));
  }
  Communicators& all = Communicators::instance();
  int index = -1;
  const auto fail = [&](const std::string& why) {
    if (index < 0) return;
    instance->initializing->fail(run.run_id, index, why);
    instance->initialized->fail(run.run_id, index, why);
  };
  try {
    const Instance::Rank* rank = instance->rank_of[ordinal].load(std::memory_order_acquire);
    if (rank != nullptr) {
      index = rank->index;
      instance->initializing->arrive_and_wait(run.run_id, index, all.deadline());
    } else {
      find_ranks_of_this_process(*instance);
      const Instance::Rank found = find_rank(*instance, all.device_ids().id_of(ordinal));
      index = found.index;
      instance->initializing->arrive_and_wait(run.run_id, index, all.deadline());
      rank = connect(*instance, found, ordinal);
    }
    if (const CallFailurePtr failure = failure_of(*instance, *rank)) {
      fail(failure->text);
      return error_of(*failure);
    }
    instance->initialized->arrive_and_wait(run.run_id, index, all.deadline());
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    fail(error.what());
    return new_error(ErrorCode::internal, instance->call.text + ": " + error.what());
  }
}

// ---- Execute --------------------------------------------------------------------------------------------------------

void launch(const Instance& instance, const Instance::Rank& rank, Stream stream, ffi::RemainingArgs args,
            ffi::RemainingRets rets) {
  const EngineType type = check_operands(instance.call, rank.group - instance.groups.data(), args, rets);
  Communicators& all = Communicators::instance();
  Gpus& gpus = all.gpus();
  const NamedRange range(gpus, instance.call.text.c_str());
  const TreeProgram* const tree = rank.group->tree.has_value() ? &*rank.group->tree : nullptr;
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i), result = **rets.get<ffi::AnyBuffer>(i);
    buffers.push_back({input.untyped_data(), result.untyped_data(), input.size_bytes()});
  }
  const std::vector<Launch> launches = launches_of(*rank.group->communicator, rank.rank, instance.site,
                                                   rank.group->thresholds, type.dtype, buffers, all.deadline(), tree);
  for (const Launch& each : launches) {
    if (gpus.has_kernel(each.kernel)) continue;
    throw std::runtime_error(
        "this build of jax_ring has no GPU kernels for the operands' dtype. Build it again "
        "without JAX_RING_CUDA_DTYPES.");
  }
  for (const Launch& each : launches) gpus.launch(each.kernel, each.call, stream);
}

// Waits for no connection. Waits for other ranks only in the first runs, and not while XLA records: nothing runs then,
// and another GPU may not record in this run.
ffi::Error execute(Instance* instance, ffi::RunId run, Stream stream, int32_t ordinal, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary /*seen by instantiate*/) {
  const Instance::Rank* rank =
      ordinal < 0 || ordinal >= kMaxOrdinals ? nullptr : instance->rank_of[ordinal].load(std::memory_order_acquire);
  if (rank == nullptr) {
    return new_error(ErrorCode::internal, instance->call.text + ": executed on the GPU with CUDA ordinal " +
                                              std::to_string(ordinal) + ", which has not been initialized");
  }
  FirstRun &launching = *rank->group->launching, &launched = *rank->group->launched;
  const auto fail = [&](const std::string& why) {
    launching.fail(run.run_id, rank->local, why);
    launched.fail(run.run_id, rank->local, why);
  };
  try {
    if (const CallFailurePtr failure = failure_of(*instance, *rank)) {
      fail(failure->text);
      return error_of(*failure);
    }
    const Communicators& all = Communicators::instance();
    if (launched.is_done()) {
      launch(*instance, *rank, stream, args, rets);
      return ffi::Error::Success();
    }
    const bool waits = !all.gpus().is_capturing(stream);
    const auto meet = [&](FirstRun& point) {
      waits ? point.arrive_and_wait(run.run_id, rank->local, all.deadline()) : point.arrive(run.run_id, rank->local);
    };
    meet(launching);
    launch(*instance, *rank, stream, args, rets);
    meet(launched);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    fail(error.what());
    return new_error(ErrorCode::internal, instance->call.text + ": " + error.what());
  }
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate().Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<Instance>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

auto execution() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<Instance>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::PlatformStream<Stream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(execute_handler, execute, execution(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(execute_unrecorded_handler, execute, execution());

}  // namespace

XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }
XLA_FFI_Error* collective_initialize(XLA_FFI_CallFrame* call_frame) { return initialize_handler(call_frame); }
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }
XLA_FFI_Error* collective_execute_unrecorded(XLA_FFI_CallFrame* call_frame) {
  return execute_unrecorded_handler(call_frame);
}

XLA_FFI_TypeId* instance_type_id() { return &Instance::id; }

XLA_FFI_TypeInfo* instance_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instance>();
  return &info;
}

}  // namespace jax_ring::gpu
