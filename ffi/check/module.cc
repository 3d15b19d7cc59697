// module.cc: the Python module `_gpu_check`: groups of ranks without JAX, for the tests and measurements of the GPU
// check.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check/backend.h"
#include "cuda/groups/communicator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_ring::check {
namespace {

template <class Value>
Value lookup(const char* what, const std::map<std::string, Value>& choices, const std::string& name) {
  const auto found = choices.find(name);
  if (found == choices.end()) throw std::invalid_argument(std::string("unknown ") + what + " " + name);
  return found->second;
}

const std::map<std::string, DType>& dtypes() {
  static const std::map<std::string, DType> all = {
#define JAX_RING_NAME(name, element) {#name, DType::name},
      JAX_RING_FOR_EACH_DTYPE(JAX_RING_NAME)
#undef JAX_RING_NAME
  };
  return all;
}

// A call, described by the arguments from Python.
struct Request {
  gpu::CallSite site;
  DType dtype;
  LaunchMode how;
  int num_shards;            // of the tree; 0: one per rank
  std::vector<int> sources;  // of the plan
};

Request request_of(const std::string& collective, const std::string& op, int root, const std::string& dtype,
                   const std::string& algorithm, const std::string& order, const std::string& how, int num_shards = 0,
                   std::vector<int> sources = {}) {
  const std::map<std::string, std::optional<Algorithm>> algorithms = {{"auto", std::nullopt},
                                                                      {"one_shot", Algorithm::one_shot},
                                                                      {"two_shot", Algorithm::two_shot},
                                                                      {"ring", Algorithm::ring}};
  Plan plan{
      lookup<Collective>("collective",
                         {{"all_reduce", Collective::all_reduce},
                          {"reduce_scatter", Collective::reduce_scatter},
                          {"all_gather", Collective::all_gather},
                          {"reduce", Collective::reduce},
                          {"broadcast", Collective::broadcast},
                          {"all_to_all", Collective::all_to_all},
                          {"permute", Collective::permute}},
                         collective),
      lookup<Order>("order", {{"rank", Order::rank}, {"ring", Order::ring}, {"any", Order::any}, {"tree", Order::tree}},
                    order),
      root};
  plan.sources = sources.data();  // stays valid when the vector is moved
  return {
      {"check", plan, lookup<Op>("operation", {{"sum", Op::sum}, {"max", Op::max}, {"min", Op::min}}, op),
       lookup("algorithm", algorithms, algorithm)},
      lookup("dtype", dtypes(), dtype),
      lookup<LaunchMode>(
          "launch mode",
          {{"together", LaunchMode::together}, {"streams", LaunchMode::streams}, {"graphs", LaunchMode::graphs}}, how),
      num_shards,
      std::move(sources)};
}

std::unique_ptr<Backend> backend_named(const std::string& name) {
  if (name == "cuda") return cuda_backend();
  if (name == "host") return host_backend();
  throw std::invalid_argument("the backend is cuda or host, got " + name);
}

// CTAs per rank if `ranks` ranks share a GPU that runs `resident` CTAs at the same time: at most `wanted`. With more,
// some CTAs would wait for others that never start.
int ctas_of_each(int wanted, int ranks, int resident) {
  if (resident < ranks) {
    throw std::runtime_error(std::to_string(ranks) + " ranks share a GPU that runs " + std::to_string(resident) +
                             " CTAs of these kernels at the same time, and each rank needs at least one. Run fewer "
                             "ranks, or build kernels that use fewer registers.");
  }
  return std::min(wanted, resident / ranks);
}

// This process's ranks in a group.
class Ranks {
 public:
  Ranks(const std::string& backend, std::vector<std::pair<int64_t, int64_t>> members, int64_t process,
        const std::string& name, double deadline_seconds, int max_ctas, gpu::KeyValueStore store)
      : backend_(backend_named(backend)), deadline_(deadline_seconds) {
    std::vector<gpu::Member> group;
    for (const auto& [owner, device] : members) group.push_back({owner, device});
    Capacity capacity = gpu::default_capacity(static_cast<int>(group.size()));
    if (backend == "host") capacity.num_ctas = 1;  // one thread per rank
    if (max_ctas > 0) capacity.num_ctas = std::min(capacity.num_ctas, max_ctas);
    // All processes see the same GPUs under the same numbers, so all get the same result.
    std::map<int64_t, int> ranks_on;
    for (const gpu::Member& member : group) ++ranks_on[member.device];
    for (const auto& [device, ranks] : ranks_on) {
      capacity.num_ctas = ctas_of_each(capacity.num_ctas, ranks, backend_->resident_ctas(static_cast<int>(device)));
    }
    members_ = group;
    communicator_.emplace(std::move(group), process, capacity, name, backend_->memory(),
                          std::make_shared<const gpu::KeyValueStore>(std::move(store)));
    for (int lane = 0; lane < gpu::kLanes; ++lane) communicator_->connect(lane, deadline_seconds);
  }

  // inputs: by rank of this process, then operand. The results have the same layout.
  std::vector<std::vector<nb::bytes>> run(const std::vector<std::vector<nb::bytes>>& inputs, const Request& request,
                                          int repeats) {
    check_sources(request);
    std::vector<std::vector<gpu::Buffer>> buffers;
    for (size_t i = 0; i < communicator_->local_ranks().size(); ++i) {
      buffers.emplace_back();
      for (const nb::bytes& input : inputs.at(i)) {
        buffers.back().push_back(allocate(device_of(i), input.size(), result_bytes(request, input.size())));
        copy_in(buffers.back().back(), input.c_str());
      }
    }
    {
      const nb::gil_scoped_release without_gil;
      backend_->run(work_of(request, buffers), request.how, repeats);
    }
    std::vector<std::vector<nb::bytes>> results;
    for (size_t i = 0; i < buffers.size(); ++i) {
      results.emplace_back();
      for (const gpu::Buffer& buffer : buffers[i]) {
        std::string result(result_bytes(request, buffer.input_bytes), '\0');
        if (!result.empty()) backend_->copy_out(result.data(), buffer.output, result.size());
        results.back().push_back(nb::bytes(result.data(), result.size()));
        release(device_of(i), buffer);
      }
    }
    return results;
  }

  // Seconds per call, for each of `samples` runs of `repeats` calls.
  std::vector<double> seconds(size_t num_bytes, const Request& request, int repeats, int samples) {
    const nb::gil_scoped_release without_gil;
    std::vector<std::vector<gpu::Buffer>> buffers;
    // Small numbers, so that sums are finite in every type. Not zeros, which move faster than real data.
    std::string data(num_bytes, '\0');
    std::minstd_rand random(1);
    for (char& byte : data) byte = static_cast<char>(random() % 16);
    for (size_t i = 0; i < communicator_->local_ranks().size(); ++i) {
      buffers.push_back({allocate(device_of(i), num_bytes, result_bytes(request, num_bytes))});
      copy_in(buffers.back()[0], data.data());
    }
    std::vector<Work> work = work_of(request, buffers);
    int runs = repeats;
    if (request.how == LaunchMode::graphs) {  // all calls in one graph: the host launches each rank once
      for (Work& rank : work) {
        const std::vector<gpu::Launch> call = rank.launches;
        for (int i = 1; i < repeats; ++i) rank.launches.insert(rank.launches.end(), call.begin(), call.end());
      }
      runs = 1;
    }
    backend_->run(work, request.how, runs);
    std::vector<double> times;
    for (int i = 0; i < samples; ++i) {
      times.push_back(backend_->run(work, request.how, runs) / repeats);
    }
    for (size_t i = 0; i < buffers.size(); ++i) release(device_of(i), buffers[i][0]);
    return times;
  }

  // Sets the round counters, which wrap around after 2^32 rounds.
  void start_from(uint32_t first) {
    const Capacity& capacity = communicator_->capacity();
    const std::vector<Progress> progress(capacity.num_ctas, Progress{first, first, first, first});
    const uint64_t flag = first;
    for (int rank : communicator_->local_ranks()) {
      for (int lane = 0; lane < gpu::kLanes; ++lane) {
        const Endpoint self = communicator_->endpoint(rank, lane, 0, 1);
        backend_->copy_in(self.progress, progress.data(), progress.size() * sizeof(Progress));
        for (size_t at = 0; at < capacity.flags_bytes(); at += kFlagBytes) {
          backend_->copy_in(self.mailbox[rank] + at, &flag, sizeof(flag));
        }
      }
    }
  }

  // The first failure as text; empty if there was none.
  std::string failure() const {
    const auto failure = communicator_->failure();
    return failure ? communicator_->describe(*failure, "check", deadline_) : "";
  }

  int num_ctas() const { return communicator_->capacity().num_ctas; }

  double copy_seconds(size_t bytes, int repeats) { return backend_->copy_seconds(device_of(0), bytes, repeats); }

 private:
  int device_of(size_t local) const { return static_cast<int>(members_[communicator_->local_ranks()[local]].device); }

  void check_sources(const Request& request) const {
    const int num_ranks = communicator_->num_ranks();
    if (request.site.plan.collective != Collective::permute) return;
    const auto is_wrong = [&](int source) { return source < kNoRank || source >= num_ranks; };
    if (request.sources.size() == static_cast<size_t>(num_ranks) &&
        std::none_of(request.sources.begin(), request.sources.end(), is_wrong)) {
      return;
    }
    throw std::invalid_argument("a permutation needs one source for each of " + std::to_string(num_ranks) +
                                " ranks, which is a rank or -1, got " + std::to_string(request.sources.size()));
  }

  size_t result_bytes(const Request& request, size_t input_bytes) const {
    const auto tree = tree_of(request);
    return result_count(request.site.plan, communicator_->num_ranks(), input_bytes / (tree ? tree->num_slots : 1));
  }

  gpu::Buffer allocate(int device, size_t input_bytes, size_t output_bytes) {
    // At least one byte: an operand may be empty, but an allocation may not.
    return {backend_->memory().allocate(device, input_bytes + 1), backend_->memory().allocate(device, output_bytes + 1),
            input_bytes};
  }
  void release(int device, const gpu::Buffer& buffer) {
    backend_->memory().release(device, const_cast<void*>(buffer.input));
    backend_->memory().release(device, buffer.output);
  }
  void copy_in(const gpu::Buffer& buffer, const void* data) {
    if (buffer.input_bytes > 0) backend_->copy_in(const_cast<void*>(buffer.input), data, buffer.input_bytes);
  }

  // Trees of all ranks; none with other orders.
  std::optional<TreeProgram> tree_of(const Request& request) const {
    if (!folds_along_tree(request.site.plan)) return std::nullopt;
    std::vector<int> ranks(communicator_->num_ranks());
    std::iota(ranks.begin(), ranks.end(), 0);
    const int num_ranks = static_cast<int>(ranks.size());
    const int num_shards = request.num_shards == 0 ? num_ranks : request.num_shards;
    const auto program = TreeCompiler::compile(Tree(num_shards, num_ranks, ranks), 1);
    if (!program) throw std::invalid_argument("the kernels have no room for this tree");
    return program;
  }

  std::vector<Work> work_of(const Request& request, const std::vector<std::vector<gpu::Buffer>>& buffers) {
    const auto tree = tree_of(request);
    std::vector<Work> work;
    for (size_t i = 0; i < buffers.size(); ++i) {
      work.push_back({device_of(i), gpu::launches_of(*communicator_, communicator_->local_ranks()[i], request.site,
                                                     default_thresholds(communicator_->num_ranks()), request.dtype,
                                                     buffers[i], deadline_, tree ? &*tree : nullptr)});
    }
    return work;
  }

  std::unique_ptr<Backend> backend_;
  double deadline_;
  std::vector<gpu::Member> members_;
  std::optional<gpu::Communicator> communicator_;
};

}  // namespace
}  // namespace jax_ring::check

NB_MODULE(_gpu_check, m) {
  using jax_ring::check::Ranks;
  using jax_ring::check::request_of;
  m.doc() = "Groups of ranks without JAX, on GPUs or on threads, for the tests and measurements of the GPU check.";

  m.def(
      "dtypes",
      [] {
        std::vector<std::string> names;
        for (const auto& [name, dtype] : jax_ring::check::dtypes()) names.push_back(name);
        return names;
      },
      "The names of the element types.");

  m.def(
      "built_dtypes",
      [](const std::string& backend) {
        const auto built = jax_ring::check::backend_named(backend);
        std::vector<std::string> names;
        for (const auto& [name, dtype] : jax_ring::check::dtypes()) {
          if (built->has_kernels(dtype)) names.push_back(name);
        }
        return names;
      },
      "backend"_a, "The names of the element types that this build has kernels of.");

  m.def(
      "resident_ctas",
      [](const std::string& backend, int device) {
        return jax_ring::check::backend_named(backend)->resident_ctas(device);
      },
      "backend"_a, "device"_a = 0, "The CTAs of any one kernel that the device runs at the same time.");

  m.def("ctas_of_each", &jax_ring::check::ctas_of_each, "wanted"_a, "ranks"_a, "resident"_a,
        "The CTAs of each of these ranks on a GPU that runs `resident` CTAs at the same time.");

  nb::class_<Ranks>(m, "Ranks", "The ranks of this process in a group.")
      .def(
          "__init__",
          [](Ranks* self, const std::string& backend, std::vector<std::pair<int64_t, int64_t>> members, int64_t process,
             const std::string& name, double deadline, int max_ctas,
             std::function<void(const std::string&, const nb::bytes&)> publish,
             std::function<nb::bytes(const std::string&)> fetch) {
            jax_ring::gpu::KeyValueStore store;
            if (publish) {
              store.publish = [publish](const std::string& key, const std::string& value) {
                publish(key, nb::bytes(value.data(), value.size()));
              };
              store.fetch = [fetch](const std::string& key) {
                const nb::bytes value = fetch(key);
                return std::string(value.c_str(), value.size());
              };
            }
            new (self) Ranks(backend, std::move(members), process, name, deadline, max_ctas, std::move(store));
          },
          "backend"_a, "members"_a, "process"_a = 0, "name"_a = "check", "deadline"_a = 20.0, "max_ctas"_a = 0,
          "publish"_a = nb::none(), "fetch"_a = nb::none(),
          "members: (process, device) by rank. max_ctas: of each rank; 0 for the engine's number, or fewer if those of "
          "all ranks do not fit. publish(key, bytes) and fetch(key) are needed between processes.")
      .def(
          "run",
          [](Ranks& self, const std::vector<std::vector<nb::bytes>>& inputs, const std::string& dtype,
             const std::string& algorithm, const std::string& order, const std::string& how, int repeats,
             const std::string& collective, const std::string& op, int root, int num_shards, std::vector<int> sources) {
            return self.run(
                inputs, request_of(collective, op, root, dtype, algorithm, order, how, num_shards, std::move(sources)),
                repeats);
          },
          "inputs"_a, "dtype"_a, "algorithm"_a = "auto", "order"_a = "rank", "how"_a = "together", "repeats"_a = 1,
          "collective"_a = "all_reduce", "op"_a = "sum", "root"_a = 0, "num_shards"_a = 0,
          "sources"_a = std::vector<int>{},
          "num_shards: of the tree with order 'tree', 0 for one for each rank. sources: of a permutation, for each "
          "rank "
          "the one whose operand it gets, or -1. "
          "The results of the ranks of this process, by rank and operand, as bytes like the inputs, without their "
          "slots.")
      .def(
          "seconds",
          [](Ranks& self, size_t num_bytes, const std::string& dtype, const std::string& algorithm,
             const std::string& order, const std::string& how, int repeats, int samples,
             const std::string& collective) {
            return self.seconds(num_bytes, request_of(collective, "sum", 0, dtype, algorithm, order, how), repeats,
                                samples);
          },
          "num_bytes"_a, "dtype"_a = "f32", "algorithm"_a = "auto", "order"_a = "rank", "how"_a = "together",
          "repeats"_a = 20, "samples"_a = 10, "collective"_a = "all_reduce", "Seconds per call, by sample.")
      .def("start_from", &Ranks::start_from, "first"_a, "Sets the round counters, as if this many rounds had been run.")
      .def("failure", &Ranks::failure, "The first failure as text; empty if there was none.")
      .def_prop_ro("num_ctas", &Ranks::num_ctas, "The CTAs of each rank.")
      .def("copy_seconds", &Ranks::copy_seconds, "num_bytes"_a, "repeats"_a,
           "Seconds that `repeats` copies of `num_bytes` bytes within a device take.");
}
