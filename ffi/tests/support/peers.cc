// peers.cc: all kernels' code for host threads, compiled once for all tests that run it.
#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

template <class Element, class Operation, Algorithm kAlgorithm>
TeamFunction team_function() {
  if constexpr (is_needed<Element, Operation, kAlgorithm>) {
    return [](const Endpoint& self, const Message& message, const Plan& plan, int cta, JitteryTeam team) {
      run_team<Element, Operation, kAlgorithm>(self, message, plan, cta, team);
    };
  }
  return nullptr;
}

template <class Element, Algorithm kAlgorithm>
TreeFunction tree_function() {
  if constexpr (has_tree<Element, Sum, kAlgorithm>) {
    return [](const Endpoint& self, const Message& message, const Plan& plan, int cta, JitteryTeam team,
              const TreeProgram& tree) {
      run_team<Element, Sum, kAlgorithm>(self, message, plan, cta, team, TreeTerms{tree});
    };
  }
  return nullptr;
}

}  // namespace

TreeFunction tree_function(DType dtype, Algorithm algorithm) {
#define JAX_RING_ALGORITHMS(name, element) \
  {tree_function<element, Algorithm::one_shot>(), tree_function<element, Algorithm::two_shot>(), nullptr},
  static const TreeFunction table[][static_cast<int>(Algorithm::count)] = {
      JAX_RING_FOR_EACH_DTYPE(JAX_RING_ALGORITHMS)};
#undef JAX_RING_ALGORITHMS
  const TreeFunction found = table[static_cast<int>(dtype)][static_cast<int>(algorithm)];
  if (found == nullptr) ADD_FAILURE() << "there is no code for " << name_of(dtype);
  return found;
}

TeamFunction team_function(DType dtype, Op op, Algorithm algorithm) {
#define JAX_RING_ALGORITHMS(element, operation)                                                                        \
  {team_function<element, operation, Algorithm::one_shot>(), team_function<element, operation, Algorithm::two_shot>(), \
   team_function<element, operation, Algorithm::ring>(), team_function<element, operation, Algorithm::multicast>()},
#define JAX_RING_OPS(name, element) \
  {JAX_RING_ALGORITHMS(element, Sum) JAX_RING_ALGORITHMS(element, Max) JAX_RING_ALGORITHMS(element, Min)},
  static const TeamFunction table[][static_cast<int>(Op::count)][static_cast<int>(Algorithm::count)] = {
      JAX_RING_FOR_EACH_DTYPE(JAX_RING_OPS)};
#undef JAX_RING_OPS
#undef JAX_RING_ALGORITHMS
  const TeamFunction found = table[static_cast<int>(dtype)][static_cast<int>(op)][static_cast<int>(algorithm)];
  if (found == nullptr) ADD_FAILURE() << "there is no code for " << name_of(dtype);
  return found;
}

}  // namespace jax_ring::cpu::testing
