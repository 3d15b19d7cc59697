// cores.h: spreads ranks over the cores.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace jax_ring::cpu {

// The cores that this thread may run on.
std::vector<int> usable_cores();

// The core that this thread runs on. The system may move it at any time.
int current_core();

// Goes on on another core, as if the system had moved this thread there. Does nothing if it may not run there.
void move_to_core(int core);

// Finds out whether ranks share cores unequally. The system takes milliseconds to mend that: it does not know that a
// thread that polls waits for another of its core.
class Spread {
 public:
  explicit Spread(std::vector<int> cores) : cores_(std::move(cores)), num_ranks_(cores_.size()) {}

  // Whether there is no core to spare, so that each must have its share of the ranks.
  bool applies_to(int num_ranks) const { return cores_.size() > 1 && num_ranks >= static_cast<int>(cores_.size()); }

  // Begins with another call of so many ranks.
  void begin(int num_ranks);

  // Adds a rank. Returns the core that it should move to, if its own has its share already.
  std::optional<int> add(int core);

  int num_added() const { return num_added_; }
  int num_moved() const { return num_moved_; }

 private:
  std::vector<int> cores_;
  std::vector<int> num_ranks_;  // by core
  int share_ = 0;
  int num_added_ = 0;
  int num_moved_ = 0;  // of those added
};

}  // namespace jax_ring::cpu
