// threads.h: the threads, locks and clock of the host. The model checker has a header of this name that takes the place
// of this one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace jax_ring {

using Mutex = std::mutex;
using ConditionVariable = std::condition_variable;
using SteadyClock = std::chrono::steady_clock;

template <class Body>
void start_detached(Body body) {
  std::thread(std::move(body)).detach();
}

// What make() creates at the first call. It is never destroyed: threads that use it may outlive main.
template <class Make>
auto& immortal(Make make) {
  static auto* const object = make();
  return *object;
}

// A variable of namespace scope of which each thread has its own, zero at first.
#define JAX_RING_THREAD_LOCAL(type, name) thread_local type name = {}

}  // namespace jax_ring
