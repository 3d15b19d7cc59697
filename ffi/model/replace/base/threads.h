// threads.h: replaces base/threads.h in the model.
#pragma once

#include <chrono>
#include <mutex>
#include <utility>

#include "model/checker/atomic.h"
#include "model/checker/locks.h"

namespace jax_ring {

using Mutex = model::Mutex;
using ConditionVariable = model::ConditionVariable;
using SteadyClock = model::SteadyClock;
template <class T>
using Atomic = model::Atomic<T>;

template <class Body>
void start_detached(const char*, Body body) {
  model::spawn_daemon("a detached thread", std::move(body));
}

// One per execution. Earlier ones are not destroyed: their threads were abandoned in the middle.
template <class Make>
auto& immortal(Make make) {
  static decltype(make()) object = nullptr;
  static uint64_t execution = 0;
  if (std::exchange(execution, model::execution()) != model::execution()) object = make();
  return *object;
}

#define JAX_RING_THREAD_LOCAL(type, name) ::jax_ring::model::PerThread<type> name

}  // namespace jax_ring
