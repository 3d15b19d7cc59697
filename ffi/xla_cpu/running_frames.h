// running_frames.h: what the threads of Python are in, seen at one moment.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_ring {

// A list of (address of the frame, its code, index of its instruction), for all threads, each from the innermost out.
nanobind::list running_frames();

}  // namespace jax_ring
