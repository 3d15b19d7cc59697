// instance.cc: makes the groups of a call from its attributes, and compiles their trees.
#include "cuda/launch/instance.h"

#include <stdexcept>
#include <utility>

namespace jax_ring::gpu {

xla::ffi::TypeId Instance::id = {};

namespace {

void add_groups(Instance& instance, const Attributes& call) {
  size_t next = 0;
  for (size_t i = 0; i < call.group_sizes.size(); ++i) {
    if (call.group_sizes[i] > kMaxRanks) {
      throw std::invalid_argument("a group has between 1 and " + std::to_string(kMaxRanks) + " GPUs; the sizes are " +
                                  list(call.group_sizes));
    }
    Instance::Group& group = instance.groups.emplace_back();
    group.thresholds = call.thresholds_of(i);
    for (const size_t end = next + call.group_sizes[i]; next < end; ++next) {
      group.members.push_back({call.processes[next], call.members[next]});
    }
  }
}

// Compiles the groups' trees for the kernels.
void add_trees(Instance& instance, const Trees& trees) {
  if (!folds_along_tree(instance.site.plan)) return;
  if (instance.site.op != Op::sum) throw std::invalid_argument("only sums have the order 'tree'");
  if (instance.site.algorithm == Algorithm::ring) {
    throw std::invalid_argument("the ring does not have the order 'tree'");
  }
  for (size_t i = 0; i < instance.groups.size(); ++i) {
    Instance::Group& group = instance.groups[i];
    const Tree& tree = trees.of_group.at(i);
    group.tree = TreeCompiler::compile(tree, trees.num_results);
    if (group.tree.has_value()) continue;
    throw std::invalid_argument("the kernels cannot add the " + std::to_string(tree.terms().size()) + " terms of " +
                                std::to_string(group.members.size()) + " GPUs, which have up to " +
                                std::to_string(tree.num_slots()) +
                                " terms each, along their tree. Choose a num_shards whose quotient by the number of "
                                "GPUs is a power of two.");
  }
}

}  // namespace

std::unique_ptr<Instance> instance_of(Attributes call) {
  try {
    if (call.plan.collective == Collective::ragged_all_to_all || call.part) {
      throw std::invalid_argument(
          "the kernels have no ragged all-to-all, whose sizes are in the GPUs' memory, and no parts of an array");
    }
    if (call.lane < 0 || call.lane >= kLanes) {
      throw std::invalid_argument("the lane is " + std::to_string(call.lane) + ", and there are " +
                                  std::to_string(kLanes) + ", numbered from 0");
    }
    auto instance = std::make_unique<Instance>();
    instance->site = {call.call, call.plan, call.op, call.algorithm, static_cast<int>(call.lane)};
    add_groups(*instance, call);
    add_trees(*instance, call.trees);
    instance->sources = std::move(call.sources);
    instance->text = call.text;
    return instance;
  } catch (const std::exception& error) {
    throw std::invalid_argument(call.text + ": " + error.what());
  }
}

}  // namespace jax_ring::gpu
