// running_frames.cc: the frames of all threads, read while none of them can go on.
#include "xla_cpu/running_frames.h"

namespace nb = nanobind;

namespace jax_ring {
namespace {

// Before Python 3.12 the allocation of a frame's object may collect garbage, by code that lets other threads run. The
// frame may return then, and its object shows whatever is in its place.
class NoCollection {
 public:
  NoCollection() : was_enabled_(PyGC_Disable() != 0) {}
  ~NoCollection() {
    if (was_enabled_) PyGC_Enable();
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  const bool was_enabled_;
};

}  // namespace

nb::list running_frames() {
  nb::list found, kept;  // no frame dies, and runs code of its variables, before all are read
  const NoCollection no_collection;
  for (nb::handle innermost : nb::module_::import_("sys").attr("_current_frames")().attr("values")()) {
    for (nb::object frame = nb::borrow(innermost); !frame.is_none(); frame = frame.attr("f_back")) {
      kept.append(frame);
      found.append(
          nb::make_tuple(reinterpret_cast<uintptr_t>(frame.ptr()), frame.attr("f_code"), frame.attr("f_lasti")));
    }
  }
  return found;
}

}  // namespace jax_ring
