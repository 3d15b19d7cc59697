// cores.h: spreads ranks over the cores.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace jax_ring::cpu {

// This thread's core. The system may move the thread at any time.
int current_core();

// Moves this thread to another core, as the system might. Does nothing if that core is not allowed.
void move_to_core(int core);

// Finds out whether ranks share cores unequally. The system takes milliseconds to fix that: it does not know that a
// polling thread waits for another one on its core.
class Spread {
 public:
  explicit Spread(std::vector<int> cores) : cores_(std::move(cores)), num_ranks_(cores_.size()) {}

  // Whether no core is to spare, so that each must have its share of the ranks.
  bool applies_to(int num_ranks) const { return cores_.size() > 1 && num_ranks >= static_cast<int>(cores_.size()); }

  // Begins with another call of this many ranks.
  void begin(int num_ranks);

  // Adds a rank. Returns the core to move to if its own core has its share already.
  std::optional<int> add(int core);

  int num_added() const { return num_added_; }
  int num_moved() const { return num_moved_; }

 private:
  std::vector<int> cores_;
  std::vector<int> num_ranks_;  // by core
  int share_ = 0;
  int num_added_ = 0;
  int num_moved_ = 0;  // among the added ranks
};

}  // namespace jax_ring::cpu
