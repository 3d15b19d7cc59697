// threads.h: the host's threads, locks and clock. The model checker replaces this header by its own of the same name.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/thread_limits.h"

namespace jax_ring {

using Mutex = std::mutex;
using ConditionVariable = std::condition_variable;
using SteadyClock = std::chrono::steady_clock;
template <class T>
using Atomic = std::atomic<T>;

// For tests: how many of the next thread starts fail, as at a limit.
inline std::atomic<int> failing_thread_starts{0};

inline bool takes_failing_start() {
  int left = failing_thread_starts.load();
  while (left > 0 && !failing_thread_starts.compare_exchange_weak(left, left - 1)) continue;
  return left > 0;
}

// Marks our threads in tools. Without a name, a thread has the name of the one that started it: XLA's.
inline void name_this_thread() { pthread_setname_np(pthread_self(), "jax_ring"); }

// Starts a thread, named jax_ring. Throws std::runtime_error, with the limits, if that fails. So start a thread before
// recording anything that relies on it. purpose: what the thread does, for the error: "runs the calls between
// processes".
template <class Body>
std::thread start_thread(const char* purpose, Body body) {
  try {
    if (takes_failing_start()) throw std::system_error(EAGAIN, std::generic_category());
    return std::thread([body = std::move(body)]() mutable {
      name_this_thread();
      body();
    });
  } catch (const std::system_error& error) {
    throw std::runtime_error(std::string("jax_ring cannot start the thread that ") + purpose + ": " +
                             error.code().message() + ". " + describe_thread_limits());
  }
}

template <class Body>
void start_detached(const char* purpose, Body body) {
  start_thread(purpose, std::move(body)).detach();
}

// The object that make() creates at the first call. Never destroyed: threads that use it may outlive main.
template <class Make>
auto& immortal(Make make) {
  static auto* const object = make();
  return *object;
}

// A thread-local variable at namespace scope, zero at first.
#define JAX_RING_THREAD_LOCAL(type, name) thread_local type name = {}

}  // namespace jax_ring
