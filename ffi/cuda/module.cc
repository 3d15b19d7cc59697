// module.cc: the Python module `_ffi_cuda`: the handlers as capsules, and the setup of GPU groups. It needs no CUDA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "cuda/communicators.h"
#include "cuda/handler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using jax_ring::gpu::Communicators;

template <class T>
nb::capsule capsule_of(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

}  // namespace

NB_MODULE(_ffi_cuda, m) {
  m.doc() = "The CUDA engine of jax_ring: XLA FFI handlers, and the setup of GPU groups.";

  m.def(
      "collective_handlers",
      [] {
        nb::typed<nb::dict, nb::str, nb::object> stages;
        stages["instantiate"] = capsule_of(&jax_ring::gpu::collective_instantiate);
        stages["initialize"] = capsule_of(&jax_ring::gpu::collective_initialize);
        stages["execute"] = capsule_of(&jax_ring::gpu::collective_execute);
        return stages;
      },
      "The handlers of the custom calls, one capsule per stage, for jax.ffi.register_ffi_target.");

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
          const nb::gil_scoped_acquire gil;
          publish(key, nb::bytes(value.data(), value.size()));
        };
        store.fetch = [fetch = std::move(fetch)](const std::string& key) {
          const nb::gil_scoped_acquire gil;
          const nb::bytes value = fetch(key);
          return std::string(value.c_str(), value.size());
        };
        Communicators::instance().set_process(process, std::move(store));
      },
      "process"_a, "publish"_a, "fetch"_a,
      "Sets the id of this process, and how it exchanges byte strings with the others: publish(key, value), and "
      "fetch(key), which blocks until the key exists.");

  m.def("fingerprint", [] { return JAX_RING_FINGERPRINT; }, "The fingerprint of the sources that this was built from.");

  m.def(
      "set_gpus",
      [](const nb::capsule& gpus) {
        Communicators::instance().set_gpus(static_cast<jax_ring::gpu::Gpus*>(gpus.data()));
      },
      "gpus"_a, "Sets the GPUs of this machine, from the module of the kernels.");

  m.def(
      "set_deadline", [](double seconds) { Communicators::instance().set_deadline(seconds); }, "seconds"_a,
      "Sets how many seconds a GPU waits for a peer.");

  m.def(
      "forget_groups", [] { Communicators::instance().reset(); }, nb::call_guard<nb::gil_scoped_release>(),
      "Makes programs compiled from now on create new groups, which is necessary after a group has failed.");
}
