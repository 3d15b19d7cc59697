// bind_kernel.cc: copies a launch's arguments, and finds the memory that they refer to.
#include <tuple>
#include <utility>

#include "cuda/kernels/kernel_table.h"
#include "tests/standin/runtime/streams.h"

namespace jax_ring::standin {
namespace {

// Memory that a rank's kernel uses besides its operands.
void reach(const gpu::Call& call, std::vector<const void*>& reached) {
  const Endpoint& self = call.self;
  for (int rank = 0; rank < self.num_ranks(); ++rank) reached.push_back(self.mailbox[rank]);
  if (self.multicast != nullptr) reached.push_back(self.multicast);
  if (self.num_ranks() > 0) reached.insert(reached.end(), {self.progress, self.failed, self.failure});
}

template <class... Arguments, size_t... kIndex>
std::tuple<Arguments...> copies_of(void (*)(Arguments...), void** arguments, std::index_sequence<kIndex...>) {
  return {*static_cast<Arguments*>(arguments[kIndex])...};
}

template <class... Arguments>
BoundKernel bind(void (*kernel)(Arguments...), void** arguments) {
  auto copies = copies_of(kernel, arguments, std::index_sequence_for<Arguments...>{});
  BoundKernel bound;
  std::apply([&](const Arguments&... each) { (reach(each, bound.reached), ...); }, copies);
  bound.call = [kernel, copies = std::move(copies)] { std::apply(kernel, copies); };
  return bound;
}

}  // namespace

BoundKernel bind_kernel(const void* kernel, void** arguments) {
  return bind(reinterpret_cast<gpu::Kernel>(const_cast<void*>(kernel)), arguments);
}

}  // namespace jax_ring::standin
