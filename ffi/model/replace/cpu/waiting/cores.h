// cores.h: replaces cpu/waiting/cores.h in the model, where threads have no cores.
#pragma once

#include <optional>
#include <vector>

namespace jax_ring::cpu {

inline int current_core() { return 0; }
inline void move_to_core(int) {}

class Spread {
 public:
  explicit Spread(const std::vector<int>&) {}
  bool applies_to(int) const { return false; }
  void begin(int) {}
  std::optional<int> add(int) { return std::nullopt; }
  int num_added() const { return 0; }
  int num_moved() const { return 0; }
};

}  // namespace jax_ring::cpu
