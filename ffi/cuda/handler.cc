// handler.cc: decodes the custom call, checks it, and launches the kernels of its plan.
#include "cuda/handler.h"

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/describe.h"
#include "common/xla_types.h"
#include "cuda/communicators.h"
#include "cuda/plan.h"

namespace jax_ring::gpu {
namespace {

namespace ffi = xla::ffi;

// One per call instruction and process, owned by the runtime.
struct Instance {
  static ffi::TypeId id;
  struct Group {
    std::vector<Member> members;
    Thresholds thresholds;
    std::shared_ptr<Communicator> communicator;  // from the first execution on
  };
  CallSite site;
  std::string text;           // for error messages
  std::vector<Group> groups;  // those that have GPUs of this process
  std::mutex mutex;
};
ffi::TypeId Instance::id = {};

// Compiles for GPUs that may be elsewhere, so it decodes and checks, and touches none.
ffi::ErrorOr<std::unique_ptr<Instance>> instantiate(
    std::string_view collective, std::string_view op, int64_t root, std::string_view algorithm, std::string_view order,
    ffi::Span<const int64_t> processes, ffi::Span<const int64_t> devices, ffi::Span<const int64_t> group_sizes,
    ffi::Span<const int64_t> one_shot_bytes, ffi::Span<const int64_t> two_shot_bytes, std::string_view call,
    std::string_view lines, int64_t lane) {
  try {
    auto instance = std::make_unique<Instance>();
    const Plan plan{named<Collective>(collective, kCollectives), named<Order>(order, kOrders), static_cast<int>(root)};
    instance->site = {std::string(call), plan, named<Op>(op, kOps), algorithm_of(algorithm)};
    instance->text = describe(call, lines);
    if (lane < 0 || lane >= kLanes) throw std::invalid_argument("there is no lane " + std::to_string(lane));
    instance->site.lane = static_cast<int>(lane);
    Communicators& all = Communicators::instance();
    if (one_shot_bytes.size() != group_sizes.size() || two_shot_bytes.size() != group_sizes.size()) {
      throw std::invalid_argument("there must be one threshold of each kind per group");
    }
    size_t next = 0;
    for (size_t group = 0; group < group_sizes.size(); ++group) {
      const int64_t size = group_sizes[group];
      if (root < 0 || root >= size) throw std::invalid_argument("the root is not in every group");
      if (size < 1 || next + size > processes.size() || processes.size() != devices.size()) {
        throw std::invalid_argument("replica groups: the sizes do not match the number of devices");
      }
      std::vector<Member> members;
      bool local = false;
      for (const size_t end = next + size; next < end; ++next) {
        members.push_back({processes[next], devices[next]});
        local = local || processes[next] == all.process();
      }
      if (!local) continue;
      const Thresholds thresholds{static_cast<uint64_t>(one_shot_bytes[group]),
                                  static_cast<uint64_t>(two_shot_bytes[group])};
      instance->groups.push_back({std::move(members), thresholds, nullptr});
    }
    return instance;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::Internal(describe(call, lines) + ": " + error.what()));
  }
}

ffi::Error failure_of(const Instance& instance) {
  for (const auto& [members, thresholds, communicator] : instance.groups) {
    if (communicator == nullptr) continue;
    if (const auto failure = communicator->failure()) {
      const std::string call = failure->call == instance.site.fingerprint() ? instance.text : "an earlier call";
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                        communicator->describe(*failure, call, Communicators::instance().deadline()));
    }
  }
  return ffi::Error::Success();
}

// Runs before every execution, including the replay of a CUDA graph, of which the host sees nothing else.
ffi::Error initialize(Instance* instance, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  try {
    const std::lock_guard<std::mutex> lock(instance->mutex);
    for (Instance::Group& group : instance->groups) {
      if (group.communicator == nullptr) {
        group.communicator = Communicators::instance().get_or_create(group.members);
      }
    }
  } catch (const std::exception& error) {
    return ffi::Error::Internal(instance->text + ": " + error.what());
  }
  return failure_of(*instance);
}

ffi::Error execute(Instance* instance, Stream stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary /*seen by instantiate*/) {
  try {
    if (args.size() == 0 || args.size() != rets.size()) {
      throw std::invalid_argument("a call needs one result per operand, and at least one operand");
    }
    if (ffi::Error error = failure_of(*instance); error.failure()) return error;
    const EngineType type = engine_type_of(instance->site.plan, args.get<ffi::AnyBuffer>(0)->element_type());
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < args.size(); ++i) {
      const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
      buffers.push_back({input.untyped_data(), (*rets.get<ffi::AnyBuffer>(i))->untyped_data(), input.size_bytes()});
    }
    for (const auto& [members, thresholds, communicator] : instance->groups) {
      const std::optional<int> rank = communicator->rank_of(device);
      if (!rank) continue;
      for (const Launch& each : launches_of(*communicator, *rank, instance->site, thresholds, type.dtype, buffers,
                                            Communicators::instance().deadline())) {
        Gpus& gpus = Communicators::instance().gpus();
        if (!gpus.has_kernel(each.kernel)) {
          throw std::runtime_error(
              "this build of jax_ring has no GPU kernels for the operands' dtype. Build it again "
              "without JAX_RING_CUDA_DTYPES.");
        }
        gpus.launch(each.kernel, each.call, stream);
      }
      return ffi::Error::Success();
    }
    throw std::out_of_range("GPU " + std::to_string(device) + " is in none of the call's replica groups");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(instance->text + ": " + error.what());
  }
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("collective")
                           .Attr<std::string_view>("op")
                           .Attr<int64_t>("root")
                           .Attr<std::string_view>("algorithm")
                           .Attr<std::string_view>("order")
                           .Attr<ffi::Span<const int64_t>>("processes")
                           .Attr<ffi::Span<const int64_t>>("devices")
                           .Attr<ffi::Span<const int64_t>>("group_sizes")
                           .Attr<ffi::Span<const int64_t>>("one_shot_bytes")
                           .Attr<ffi::Span<const int64_t>>("two_shot_bytes")
                           .Attr<std::string_view>("call")
                           .Attr<std::string_view>("site")
                           .Attr<int64_t>("lane"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<Instance>>().RemainingArgs().RemainingRets().Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<Instance>>()
                           .Ctx<ffi::PlatformStream<Stream>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }
XLA_FFI_Error* collective_initialize(XLA_FFI_CallFrame* call_frame) { return initialize_handler(call_frame); }
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

XLA_FFI_TypeId* instance_type_id() { return &Instance::id; }

XLA_FFI_TypeInfo* instance_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instance>();
  return &info;
}

}  // namespace jax_ring::gpu
