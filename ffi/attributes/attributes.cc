// attributes.cc: reads the attributes by name, and checks that they fit each other.
#include "attributes/attributes.h"

#include <set>
#include <stdexcept>
#include <string_view>

#include "base/describe.h"
#include "base/printable.h"

namespace jax_ring {
namespace {

namespace ffi = xla::ffi;
using Numbers = std::vector<int64_t>;

constexpr size_t kNumAttributes = 21;

[[noreturn]] void fail_as_of_another_version(const std::string& why) {
  throw std::invalid_argument(why +
                              ", so the program was exported or compiled with another version of jax_ring. Export or "
                              "compile it again with the version that runs it.");
}

template <class T>
T get(ffi::Dictionary all, std::string_view name) {
  const ffi::ErrorOr<T> value = all.get<T>(name);
  if (value) return *value;
  fail_as_of_another_version("the attribute '" + std::string(name) + "' is missing or has another type");
}
std::string_view text_of(ffi::Dictionary all, std::string_view name) { return get<std::string_view>(all, name); }
Numbers numbers_of(ffi::Dictionary all, std::string_view name) {
  const auto span = get<ffi::Span<const int64_t>>(all, name);
  return {span.begin(), span.end()};
}

// The enumerator called `name`; `names` lists them in the order of the enumeration.
template <class Enum, size_t kCount>
Enum named(std::string_view name, const std::string_view (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown attribute value " + std::string(name));
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
    if (source >= 0 && static_cast<size_t>(source) < sources.size() && !is_sent[source]) {
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

void read(ffi::Dictionary all, Attributes& call) {
  constexpr std::string_view kAlgorithms[] = {"one_shot", "two_shot", "ring"}, kRounded[] = {"", "bfloat16", "float16"};
  constexpr ffi::DataType kRoundsTo[] = {ffi::DataType::INVALID, ffi::BF16, ffi::F16};
  const auto root = get<int64_t>(all, "root");
  call.plan = {named<Collective>(text_of(all, "collective"), kCollectives),
               named<Order>(text_of(all, "order"), kOrders), static_cast<int>(root)};
  call.op = named<Op>(text_of(all, "op"), kOps);
  const std::string_view algorithm = text_of(all, "algorithm");
  if (algorithm != "auto") call.algorithm = named<Algorithm>(algorithm, kAlgorithms);
  call.group_sizes = numbers_of(all, "group_sizes");
  call.members = numbers_of(all, "members");
  call.processes = numbers_of(all, "processes");
  check_groups(call, root);
  call.thresholds =
      thresholds_of(numbers_of(all, "one_shot_bytes"), numbers_of(all, "two_shot_bytes"), call.group_sizes.size());
  const Numbers sources = numbers_of(all, "sources"), part = numbers_of(all, "part"),
                shards = numbers_of(all, "tree_shards"), sizes = numbers_of(all, "tree_sizes"),
                ranks = numbers_of(all, "tree_ranks");
  call.sources = sources_of(call.plan, sources, call.group_sizes);
  call.plan.sources = call.sources.data();
  call.trees = trees_of(call.plan, call.group_sizes, shards, sizes, ranks);
  call.part = part_of(call.plan, part);
  call.rounds_to = kRoundsTo[named<int>(text_of(all, "rounds_to"), kRounded)];
  call.blocks_apart = get<int64_t>(all, "blocks_apart") != 0;
  if (call.blocks_apart && call.plan.collective != Collective::all_to_all) {
    throw std::invalid_argument("only an all-to-all can have an operand for each rank");
  }
  call.program = text_of(all, "program");
  call.lane = get<int64_t>(all, "lane");
  if (all.size() != kNumAttributes) {
    fail_as_of_another_version("there are " + std::to_string(all.size()) + " attributes, not " +
                               std::to_string(kNumAttributes));
  }
  call.hash.add(std::string_view(call.call)).add(call.plan.collective).add(call.plan.order).add(root).add(call.op);
  call.hash.add(call.algorithm.value_or(Algorithm::count)).add(call.rounds_to).add(call.blocks_apart);
  for (const Numbers* numbers : {&sources, &shards, &sizes, &ranks, &part}) {
    for (int64_t number : *numbers) call.hash.add(number);
  }
}

}  // namespace

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
  if (left != 0 || call.members.empty()) {
    throw std::invalid_argument("groups of the sizes " + list(call.group_sizes) + " do not hold " +
                                std::to_string(call.members.size()) + " members");
  }
  if (std::set<int64_t>(call.members.begin(), call.members.end()).size() != call.members.size()) {
    throw std::invalid_argument("a member is in the groups twice: " + list(call.members));
  }
}

const Thresholds& Attributes::thresholds_of(size_t group) const {
  if (thresholds.empty()) throw std::invalid_argument("a group whose ranks choose an algorithm has no thresholds");
  return thresholds[group];
}

Attributes attributes_of(ffi::Dictionary all) {
  Attributes call;
  call.text = "jax_ring";
  try {
    call.call = printable(text_of(all, "call"));
    call.text = describe(call.call, text_of(all, "site"));
    read(all, call);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(printable(call.text + ": " + error.what()));
  }
  return call;
}

std::string list(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

}  // namespace jax_ring
