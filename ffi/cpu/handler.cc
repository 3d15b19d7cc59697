// handler.cc: decodes the custom call, checks it, and hands it to the rendezvous and the engine.
#include "cpu/handler.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/engine.h"
#include "cpu/float_mode.h"
#include "cpu/rendezvous.h"
#include "xla_types.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

// One per call instruction and process; the runtime owns it.
struct CallSite {
  static ffi::TypeId id;
  CallSite(ReplicaGroups groups, std::string call, Plan plan, Op op)
      : rendezvous(std::move(groups), std::move(call)), plan(plan), op(op) {}
  Rendezvous rendezvous;
  Plan plan;
  Op op;
};
ffi::TypeId CallSite::id = {};

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(ffi::ThreadPool& pool) : pool_(pool) {}
  int num_threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(std::string_view collective, std::string_view op, int64_t root,
                                                    std::string_view /*algorithm*/, std::string_view order,
                                                    ffi::Span<const int64_t> partitions,
                                                    ffi::Span<const int64_t> group_sizes, std::string_view call) {
  try {
    const Plan plan{named<Collective>(collective, kCollectives), named<Order>(order, kOrders), static_cast<int>(root)};
    for (int64_t size : group_sizes) {
      if (root < 0 || root >= size) throw std::invalid_argument("jax_ring: the root is not in every group");
    }
    ReplicaGroups groups({partitions.begin(), partitions.end()}, {group_sizes.begin(), group_sizes.end()});
    return std::make_unique<CallSite>(std::move(groups), std::string(call), plan, named<Op>(op, kOps));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  }
}

ffi::Future execute(CallSite* site, ffi::RunId run, ffi::ThreadPool pool, ffi::BufferR0<ffi::U32> partition,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary /*seen by instantiate*/) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    if (args.size() == 0 || args.size() != rets.size()) {
      throw std::invalid_argument("jax_ring: a call needs one result for each of its operands");
    }
    const Element element = element_of(site->plan, args.get<ffi::AnyBuffer>(0)->element_type());
    const int group_size = site->rendezvous.group_size(*partition.typed_data());
    // Kept from call to call for the memory of their vectors.
    thread_local Message message;
    thread_local Participant participant;
    message.dtype = element.dtype;
    message.plan = site->plan;
    message.op = site->op;
    message.counts.clear();
    participant.inputs.clear();
    participant.outputs.clear();
    for (size_t i = 0; i < args.size(); ++i) {
      const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
      ffi::AnyBuffer output = **rets.get<ffi::AnyBuffer>(i);
      if (output.element_count() != result_count(site->plan, group_size, input.element_count())) {
        throw std::invalid_argument("jax_ring: a result is not as large as its operand and the group ask for");
      }
      message.counts.push_back(input.element_count() * element.per_element);
      participant.inputs.push_back(input.untyped_data());
      participant.outputs.push_back(output.untyped_data());
    }
    // What follows on this rank may run on another thread, and must compute there as it would have here.
    participant.done = [promise, mode = FloatMode::current()](const std::string* error) mutable {
      const ScopedFloatMode as_before(mode);
      if (error == nullptr) {
        promise.SetAvailable();
      } else {
        promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *error));
      }
    };
    auto meeting = site->rendezvous.arrive(run.run_id, *partition.typed_data(), std::move(participant));
    if (meeting != nullptr) {
      XlaWorkers workers(pool);
      run_collective(std::move(meeting), message, workers);
    }
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
                           .Attr<std::string_view>("algorithm")
                           .Attr<std::string_view>("order")
                           .Attr<ffi::Span<const int64_t>>("partitions")
                           .Attr<ffi::Span<const int64_t>>("group_sizes")
                           .Attr<std::string_view>("call"));

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR0<ffi::U32>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

XLA_FFI_TypeInfo* call_site_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_ring::cpu
