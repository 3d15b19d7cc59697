// python_lock.h: the interpreter's lock: without it no Python program launches executions.
#pragma once

#include <memory>

#include "cpu/rendezvous/watchdog.h"

namespace jax_ring::cpu {

// Null in a free-threaded interpreter, which has no such lock.
std::unique_ptr<LaunchLock> python_lock();

}  // namespace jax_ring::cpu
