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

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

// One per call instruction and process; the runtime owns it.
struct CallSite {
  static ffi::TypeId id;
  CallSite(ReplicaGroups groups, std::string call, Order order)
      : rendezvous(std::move(groups), std::move(call)), order(order) {}
  Rendezvous rendezvous;
  Order order;
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

// The engine's element type for XLA's, and how many engine elements one XLA element is.
struct Element {
  DType dtype;
  size_t per_element;
};

Element element_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::S8:
    case ffi::U8:
      return {DType::u8, 1};
    case ffi::S16:
    case ffi::U16:
      return {DType::u16, 1};
    case ffi::S32:
    case ffi::U32:
      return {DType::u32, 1};
    case ffi::S64:
    case ffi::U64:
      return {DType::u64, 1};
    case ffi::F16:
      return {DType::f16, 1};
    case ffi::BF16:
      return {DType::bf16, 1};
    case ffi::F32:
      return {DType::f32, 1};
    case ffi::F64:
      return {DType::f64, 1};
    case ffi::C64:
      return {DType::f32, 2};
    case ffi::C128:
      return {DType::f64, 2};
    case ffi::F8E5M2:
      return {DType::f8e5m2, 1};
    case ffi::F8E4M3:
      return {DType::f8e4m3, 1};
    case ffi::F8E3M4:
      return {DType::f8e3m4, 1};
    case ffi::F8E4M3FN:
      return {DType::f8e4m3fn, 1};
    case ffi::F8E4M3B11FNUZ:
      return {DType::f8e4m3b11fnuz, 1};
    case ffi::F8E4M3FNUZ:
      return {DType::f8e4m3fnuz, 1};
    case ffi::F8E5M2FNUZ:
      return {DType::f8e5m2fnuz, 1};
    default:
      throw std::invalid_argument("jax_ring_all_reduce: no fold for XLA element type " +
                                  std::to_string(static_cast<int>(dtype)));
  }
}

Order order_of(std::string_view name) {
  if (name == "rank") return Order::rank;
  if (name == "ring") return Order::ring;
  throw std::invalid_argument("jax_ring_all_reduce: unknown order " + std::string(name));
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Span<const int64_t> partitions,
                                                    ffi::Span<const int64_t> group_sizes, std::string_view call,
                                                    std::string_view /*algorithm*/, std::string_view order) {
  try {
    ReplicaGroups groups({partitions.begin(), partitions.end()}, {group_sizes.begin(), group_sizes.end()});
    return std::make_unique<CallSite>(std::move(groups), std::string(call), order_of(order));
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
      throw std::invalid_argument("jax_ring_all_reduce: needs one result for each of its operands");
    }
    const Element element = element_of(args.get<ffi::AnyBuffer>(0)->element_type());
    Message message{element.dtype, {}, site->order};
    Participant participant;
    for (size_t i = 0; i < args.size(); ++i) {
      const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
      message.counts.push_back(input.element_count() * element.per_element);
      participant.inputs.push_back(input.untyped_data());
      participant.outputs.push_back((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
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
      all_reduce(std::move(meeting), message, workers);
    }
  } catch (const std::exception& error) {
    promise.SetError(ffi::Error::Internal(error.what()));
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<ffi::Span<const int64_t>>("partitions")
                           .Attr<ffi::Span<const int64_t>>("group_sizes")
                           .Attr<std::string_view>("call")
                           .Attr<std::string_view>("algorithm")
                           .Attr<std::string_view>("order"));

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

XLA_FFI_Error* all_reduce_instantiate(XLA_FFI_CallFrame* call_frame) { return instantiate_handler(call_frame); }
XLA_FFI_Error* all_reduce_execute(XLA_FFI_CallFrame* call_frame) { return execute_handler(call_frame); }

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

XLA_FFI_TypeInfo* call_site_type_info() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace jax_ring::cpu
