// module.cc: the Python module `_ffi_cuda`: the handlers as capsules, and the setup of GPU groups. It needs no CUDA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "attributes/trees.h"
#include "base/call_failure.h"
#include "cuda/groups/communicators.h"
#include "cuda/launch/handler.h"
#include "device/fold/tree_program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using jax_ring::gpu::Communicators;

// Calls into Python. Converts errors to text, because the contents of a Python error need the GIL wherever it is
// caught.
template <class Action>
auto with_python(const Action& action) {
  const nb::gil_scoped_acquire gil;
  try {
    return action();
  } catch (const nb::python_error& error) {
    throw std::runtime_error(error.what());
  }
}

template <class T>
nb::capsule capsule_of(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

}  // namespace

NB_MODULE(_ffi_cuda, m) {
  m.doc() = "The CUDA engine of jax_ring: XLA FFI handlers, and the setup of GPU groups.";

  m.def(
      "collective_handlers",
      [](bool recorded) {
        nb::typed<nb::dict, nb::str, nb::object> stages;
        stages["instantiate"] = capsule_of(&jax_ring::gpu::collective_instantiate);
        stages["initialize"] = capsule_of(&jax_ring::gpu::collective_initialize);
        stages["execute"] =
            capsule_of(recorded ? &jax_ring::gpu::collective_execute : &jax_ring::gpu::collective_execute_unrecorded);
        return stages;
      },
      "recorded"_a = true,
      "The handlers of the custom calls, one capsule per stage, for jax.ffi.register_ffi_target. "
      "recorded: whether XLA may record the calls in a CUDA graph.");

  m.def(
      "instance_type",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> type;
        type["type_id"] = capsule_of(jax_ring::gpu::instance_type_id());
        type["type_info"] = capsule_of(jax_ring::gpu::instance_type_info());
        return type;
      },
      "The type of the handlers' state, for jax.ffi.register_ffi_type.");

  m.def(
      "set_process",
      [](int process, std::function<void(const std::string&, const nb::bytes&)> publish,
         std::function<nb::bytes(const std::string&)> fetch) {
        jax_ring::gpu::KeyValueStore store;
        store.publish = [publish = std::move(publish)](const std::string& key, const std::string& value) {
          with_python([&] { publish(key, nb::bytes(value.data(), value.size())); });
        };
        store.fetch = [fetch = std::move(fetch)](const std::string& key) {
          return with_python([&] {
            const nb::bytes value = fetch(key);
            return std::string(value.c_str(), value.size());
          });
        };
        const nb::gil_scoped_release without_gil;  // it may wait for GPUs of the forgotten groups
        Communicators::instance().set_process(process, std::move(store));
      },
      "process"_a, "publish"_a, "fetch"_a,
      "Sets the id of this process, and how it exchanges byte strings with the others: publish(key, value), and "
      "fetch(key), which blocks until the key exists, and raises after a deadline. Forgets all groups.");

  m.def(
      "set_device_ids",
      [](std::function<std::map<int, int64_t>()> find) {
        Communicators::instance().device_ids().set([find = std::move(find)] { return with_python(find); });
      },
      "find"_a,
      "Sets how to find the ids that programs use for the GPUs of this process: find() returns {CUDA ordinal: id}. It "
      "is called when an unknown GPU executes a program, with no lock held.");

  m.def(
      "serves_tree",
      [](int64_t num_shards, int64_t num_ranks, const std::vector<int64_t>& ranks) {
        const jax_ring::Tree tree = jax_ring::tree_of(num_shards, num_ranks, ranks);
        return jax_ring::TreeCompiler::compile(tree, static_cast<int>(tree.roots().size())).has_value();
      },
      "num_shards"_a, "num_ranks"_a, "ranks"_a,
      "Whether the kernels can add along a tree over `num_shards` shards, which `num_ranks` ranks share, in a group of "
      "these of them.");

  m.def("fingerprint", [] { return JAX_RING_FINGERPRINT; }, "The fingerprint of the sources that this was built from.");

  m.def(
      "share_failures",
      [](const nb::capsule& failures) {
        jax_ring::CallFailures::share(
            static_cast<jax_ring::CallFailures*>(failures.data(jax_ring::CallFailures::kCapsule)));
      },
      "failures"_a, "Keeps failures from now on with those of another module.");

  m.def(
      "set_gpus",
      [](const nb::capsule& gpus) {
        Communicators::instance().set_gpus(static_cast<jax_ring::gpu::Gpus*>(gpus.data(jax_ring::gpu::Gpus::kCapsule)));
      },
      "gpus"_a, "Sets the GPUs of this machine, from the module of the kernels.");

  m.def(
      "set_deadline", [](double seconds) { Communicators::instance().set_deadline(seconds); }, "seconds"_a,
      "Sets how many seconds a GPU waits for a peer.");

  m.def(
      "forget_groups", [] { Communicators::instance().reset(); }, nb::call_guard<nb::gil_scoped_release>(),
      "Makes programs compiled from now on create new groups, which is necessary after a group has failed. Programs "
      "compiled before raise an error. Waits for the work of the groups' GPUs.");

  m.def(
      "failure",
      [] {
        std::string text;
        for (const std::string& each : Communicators::instance().failures()) text += (text.empty() ? "" : "\n") + each;
        return text;
      },
      "The failures that the GPUs of this process have recorded, as text; empty if there are none.");
}
