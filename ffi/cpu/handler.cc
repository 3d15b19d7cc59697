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

// The engine's element type for XLA's, and how many engine elements one XLA element is.
struct Element {
  DType dtype;
  size_t per_element;
};

Element element_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::PRED:
    case ffi::U8:
      return {DType::u8, 1};
    case ffi::S8:
      return {DType::s8, 1};
    case ffi::S16:
      return {DType::s16, 1};
    case ffi::U16:
      return {DType::u16, 1};
    case ffi::S32:
      return {DType::s32, 1};
    case ffi::U32:
      return {DType::u32, 1};
    case ffi::S64:
      return {DType::s64, 1};
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
      throw std::invalid_argument("jax_ring: no fold for XLA element type " + std::to_string(static_cast<int>(dtype)));
  }
}

// What is only moved is moved as bytes.
Element element_of(const Plan& plan, ffi::DataType dtype) {
  if (plan.collective == Collective::all_gather || plan.collective == Collective::broadcast) {
    return {DType::u8, ffi::ByteWidth(dtype)};
  }
  return element_of(dtype);
}

// The value of an attribute, by its name among `names`, in the order of the enumeration.
template <class Enum, size_t kCount>
Enum named(std::string_view name, const std::string_view (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("jax_ring: unknown attribute value " + std::string(name));
}

constexpr std::string_view kCollectives[] = {"all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"};
constexpr std::string_view kOps[] = {"sum", "max", "min"};
constexpr std::string_view kOrders[] = {"rank", "ring"};

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
    Message message{element.dtype, {}, site->plan, site->op};
    Participant participant;
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
