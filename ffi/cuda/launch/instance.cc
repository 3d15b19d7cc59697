// instance.cc: makes the groups of a call from its attributes, and compiles their trees.
#include "cuda/launch/instance.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ring::gpu {

xla::ffi::TypeId Instance::id = {};

namespace {

void add_groups(Instance& instance) {
  const Attributes& call = instance.call;
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
void add_trees(Instance& instance) {
  const Trees& trees = instance.call.trees;
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
  const std::string text = call.text;
  try {
    if (call.plan.collective == Collective::ragged_all_to_all || call.part) {
      throw std::invalid_argument(
          "the kernels have no ragged all-to-all, whose sizes are in the GPUs' memory, and no parts of an array");
    }
    if (call.lane < 0 || call.lane >= kLanes) {
      throw std::invalid_argument("the lane is " + std::to_string(call.lane) + ", and there are " +
                                  std::to_string(kLanes) + ", numbered from 0");
    }
    if (call.blocks_apart) throw std::invalid_argument("the kernels have no blocks that are apart");
    auto instance = std::make_unique<Instance>(std::move(call));
    const Attributes& kept = instance->call;
    instance->site = {kept.call, kept.plan, kept.op, kept.algorithm, static_cast<int>(kept.lane)};
    add_groups(*instance);
    add_trees(*instance);
    return instance;
  } catch (const std::exception& error) {
    throw std::invalid_argument(text + ": " + error.what());
  }
}

}  // namespace jax_ring::gpu
