// attributes.cc: reads the attributes by their names, and checks that they fit each other.
#include "attributes/attributes.h"

#include <set>
#include <stdexcept>
#include <string_view>

#include "attributes/reader.h"
#include "base/describe.h"

namespace jax_ring {
namespace {

namespace ffi = xla::ffi;
using Numbers = std::vector<int64_t>;

// The enumerator whose name is `name`; `names` lists them in the order of the enumeration.
template <class Enum, size_t kCount>
Enum named(std::string_view name, const std::string_view (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown attribute value " + std::string(name));
}

// The requested algorithm; none if the engine chooses.
std::optional<Algorithm> algorithm_of(std::string_view name) {
  constexpr std::string_view kAlgorithms[] = {"one_shot", "two_shot", "ring"};
  if (name == "auto") return std::nullopt;
  return named<Algorithm>(name, kAlgorithms);
}

void check_groups(const Attributes& call, int64_t root) {
  if (call.processes.size() != call.members.size()) {
    throw std::invalid_argument("there are " + std::to_string(call.members.size()) + " members and " +
                                std::to_string(call.processes.size()) + " processes of them");
  }
  int64_t left = static_cast<int64_t>(call.members.size());
  for (int64_t size : call.group_sizes) {
    if (root < 0 || root >= size) {
      throw std::invalid_argument("the root, rank " + std::to_string(root) + ", is not in a group of " +
                                  std::to_string(size));
    }
    left = size > left ? -1 : left - size;
  }
  if (left != 0) {
    throw std::invalid_argument("groups of the sizes " + list(call.group_sizes) + " do not hold " +
                                std::to_string(call.members.size()) + " members");
  }
  if (std::set<int64_t>(call.members.begin(), call.members.end()).size() != call.members.size()) {
    throw std::invalid_argument("a member is in the groups twice: " + list(call.members));
  }
}

// The attribute `sources`, see Plan::sources. Empty unless the collective is a permutation.
std::vector<int> sources_of(const Plan& plan, const Numbers& sources, const Numbers& group_sizes) {
  const bool permutes = plan.collective == Collective::permute;
  std::vector<bool> is_sent(sources.size());
  for (int64_t size : group_sizes) {
    if (sources.size() == (permutes ? static_cast<size_t>(size) : 0)) continue;
    throw std::invalid_argument("there are " + std::to_string(sources.size()) + " sources for a group of " +
                                std::to_string(size) + " ranks");
  }
  for (int64_t source : sources) {
    if (source == kNoRank) continue;
    const bool exists = source >= 0 && static_cast<size_t>(source) < sources.size();
    if (exists && !is_sent[source]) {
      is_sent[source] = true;
      continue;
    }
    throw std::invalid_argument("the source " + std::to_string(source) + " of a permutation of " +
                                std::to_string(sources.size()) + " ranks is no rank of it, or has two receivers");
  }
  return {sources.begin(), sources.end()};
}

std::vector<Thresholds> thresholds_of(const Numbers& one_shot, const Numbers& two_shot, size_t num_groups) {
  std::vector<Thresholds> thresholds;
  if (one_shot.size() != two_shot.size() || (one_shot.size() != 0 && one_shot.size() != num_groups)) {
    throw std::invalid_argument("there are " + std::to_string(num_groups) + " groups, with " +
                                std::to_string(one_shot.size()) + " and " + std::to_string(two_shot.size()) +
                                " thresholds");
  }
  for (size_t i = 0; i < one_shot.size(); ++i) {
    if (one_shot[i] < 0 || two_shot[i] < 0) {
      throw std::invalid_argument("the thresholds of a group are " + std::to_string(one_shot[i]) + " and " +
                                  std::to_string(two_shot[i]) + " bytes");
    }
    thresholds.push_back({static_cast<uint64_t>(one_shot[i]), static_cast<uint64_t>(two_shot[i])});
  }
  return thresholds;
}

std::optional<Range> part_of(const Plan& plan, const Numbers& part) {
  if (part.size() == 0) return std::nullopt;
  const bool serves_parts = plan.collective == Collective::reduce_scatter || plan.collective == Collective::all_gather;
  if (!serves_parts || folds_along_tree(plan) || part.size() != 2 || part[0] < 0 || part[1] < 0) {
    throw std::invalid_argument("only a reduce-scatter and an all-gather can be for a part, of two numbers");
  }
  return Range{static_cast<size_t>(part[0]), static_cast<size_t>(part[1])};
}

ffi::DataType rounds_to_of(std::string_view name) {
  if (name.empty()) return ffi::DataType::INVALID;
  if (name == "bfloat16") return ffi::BF16;
  if (name == "float16") return ffi::F16;
  throw std::invalid_argument("no part is rounded to " + std::string(name));
}

void read(Reader& all, Attributes& call) {
  const int64_t root = all.number("root");
  call.plan = {named<Collective>(all.text("collective"), kCollectives), named<Order>(all.text("order"), kOrders),
               static_cast<int>(root)};
  call.op = named<Op>(all.text("op"), kOps);
  call.algorithm = algorithm_of(all.text("algorithm"));
  call.group_sizes = all.numbers("group_sizes");
  call.members = all.numbers("members");
  call.processes = all.numbers("processes");
  check_groups(call, root);
  call.thresholds =
      thresholds_of(all.numbers("one_shot_bytes"), all.numbers("two_shot_bytes"), call.group_sizes.size());
  const Numbers sources = all.numbers("sources"), part = all.numbers("part"), shards = all.numbers("tree_shards"),
                sizes = all.numbers("tree_sizes"), ranks = all.numbers("tree_ranks");
  call.sources = sources_of(call.plan, sources, call.group_sizes);
  call.plan.sources = call.sources.data();
  call.trees = trees_of(call.plan, call.group_sizes, shards, sizes, ranks);
  call.part = part_of(call.plan, part);
  call.rounds_to = rounds_to_of(all.text("rounds_to"));
  call.program = all.text("program");
  call.lane = all.number("lane");
  all.expect_end();
  call.hash.add(std::string_view(call.call)).add(call.plan.collective).add(call.plan.order).add(call.plan.root);
  call.hash.add(call.op).add(call.algorithm.value_or(Algorithm::count)).add(call.rounds_to);
  for (const Numbers* numbers : {&sources, &shards, &sizes, &ranks, &part}) {
    for (int64_t number : *numbers) call.hash.add(number);
  }
}

}  // namespace

const Thresholds& Attributes::thresholds_of(size_t group) const {
  if (thresholds.empty()) throw std::invalid_argument("a group whose ranks choose an algorithm has no thresholds");
  return thresholds[group];
}

Attributes attributes_of(ffi::Dictionary all) {
  Reader reader(all);
  Attributes call;
  call.text = "jax_ring";
  try {
    call.call = reader.text("call");
    call.text = describe(call.call, reader.text("site"));
    read(reader, call);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(call.text + ": " + error.what());
  }
  return call;
}

std::string list(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

}  // namespace jax_ring
