// instance.cc: reads the groups of a call from its attributes, and compiles their trees.
#include "cuda/launch/instance.h"

#include <set>
#include <stdexcept>

namespace jax_ring::gpu {

xla::ffi::TypeId Instance::id = {};

std::string list(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

std::vector<Instance::Group> groups_of(const std::vector<int64_t>& processes, const std::vector<int64_t>& devices,
                                       const std::vector<int64_t>& sizes, const std::vector<int64_t>& one_shot_bytes,
                                       const std::vector<int64_t>& two_shot_bytes, int64_t root) {
  if (processes.size() != devices.size()) {
    throw std::invalid_argument("there are " + std::to_string(devices.size()) + " devices and " +
                                std::to_string(processes.size()) + " processes of them");
  }
  if (one_shot_bytes.size() != sizes.size() || two_shot_bytes.size() != sizes.size()) {
    throw std::invalid_argument("there are " + std::to_string(sizes.size()) + " groups, with " +
                                std::to_string(one_shot_bytes.size()) + " and " +
                                std::to_string(two_shot_bytes.size()) + " thresholds");
  }
  std::vector<Instance::Group> groups(sizes.size());
  std::set<int64_t> seen;
  size_t next = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = sizes[i];
    if (size < 1 || size > kMaxRanks) {
      throw std::invalid_argument("a group has between 1 and " + std::to_string(kMaxRanks) + " GPUs; the sizes are " +
                                  list(sizes));
    }
    if (next + size > devices.size()) {
      throw std::invalid_argument("groups of the sizes " + list(sizes) + " do not fit " +
                                  std::to_string(devices.size()) + " devices");
    }
    if (root < 0 || root >= size) {
      throw std::invalid_argument("the root, rank " + std::to_string(root) + ", is not in a group of " +
                                  std::to_string(size));
    }
    if (one_shot_bytes[i] < 0 || two_shot_bytes[i] < 0) {
      throw std::invalid_argument("the thresholds of a group are " + std::to_string(one_shot_bytes[i]) + " and " +
                                  std::to_string(two_shot_bytes[i]) + " bytes");
    }
    groups[i].thresholds = {static_cast<uint64_t>(one_shot_bytes[i]), static_cast<uint64_t>(two_shot_bytes[i])};
    for (const size_t end = next + size; next < end; ++next) {
      if (!seen.insert(devices[next]).second) {
        throw std::invalid_argument("device " + std::to_string(devices[next]) +
                                    " is in the groups twice: " + list(devices));
      }
      groups[i].members.push_back({processes[next], devices[next]});
    }
  }
  if (next != devices.size()) {
    throw std::invalid_argument("groups of the sizes " + list(sizes) + " do not hold " +
                                std::to_string(devices.size()) + " devices");
  }
  return groups;
}

void add_trees(std::vector<Instance::Group>& groups, const Trees& trees, const CallSite& site) {
  if (!folds_along_tree(site.plan)) return;
  if (site.op != Op::sum) throw std::invalid_argument("only sums have the order 'tree'");
  if (site.algorithm == Algorithm::ring) throw std::invalid_argument("the ring does not have the order 'tree'");
  for (size_t i = 0; i < groups.size(); ++i) {
    const Tree& tree = trees.of_group.at(i);
    groups[i].tree = TreeCompiler::compile(tree, trees.num_results);
    if (groups[i].tree.has_value()) continue;
    throw std::invalid_argument("the kernels cannot add the " + std::to_string(tree.terms().size()) + " terms of " +
                                std::to_string(groups[i].members.size()) + " GPUs, which have up to " +
                                std::to_string(tree.num_slots()) +
                                " terms each, along their tree. Choose a num_shards whose quotient by the number of "
                                "GPUs is a power of two.");
  }
}

}  // namespace jax_ring::gpu
