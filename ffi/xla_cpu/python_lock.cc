// python_lock.cc: a thread that takes the interpreter's lock, so that others need not wait for it long.
#include "xla_cpu/python_lock.h"

#include <Python.h>
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "base/threads.h"

namespace jax_ring::cpu {
namespace {

// A thread in Python may keep the lock as long as it likes, and wait for an execution meanwhile.
constexpr std::chrono::milliseconds kLongestWait{200};

// Whether Python launches nothing any more. The thread that ends it may hold its lock until all executions have ended.
bool has_ended() {
  // The stable interface has it since Python 3.13; before, it has another name.
  static void* const named = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
  static void* const found = named != nullptr ? named : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  return !Py_IsInitialized() || (found != nullptr && reinterpret_cast<int (*)()>(found)() != 0);
}

class PythonLock final : public LaunchLock {
 public:
  bool acquire() override {
    if (has_ended()) return true;
    auto state = std::make_shared<State>();
    try {
      // If the interpreter ends first, this thread ends without the lock.
      start_detached("keeps Python from launching", [state] {
        const PyGILState_STATE before = PyGILState_Ensure();
        {
          std::unique_lock<std::mutex> lock(state->mutex);
          state->is_held = true;
          state->changed.notify_all();
          state->changed.wait(lock, [&] { return state->is_done; });
        }
        PyGILState_Release(before);
      });
    } catch (const std::runtime_error&) {
      return false;  // at a limit of threads
    }
    std::unique_lock<std::mutex> lock(state->mutex);
    if (!state->changed.wait_for(lock, kLongestWait, [&] { return state->is_held; })) {
      state->is_done = true;
      return false;
    }
    lock.unlock();
    state_ = std::move(state);
    return true;
  }

  void release() override {
    if (state_ == nullptr) return;
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->is_done = true;
    }
    state_->changed.notify_all();
    state_.reset();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_held = false;
    bool is_done = false;
  };

  std::shared_ptr<State> state_;
};

}  // namespace

std::unique_ptr<LaunchLock> python_lock() {
#ifdef Py_GIL_DISABLED
  return nullptr;
#else
  return std::make_unique<PythonLock>();
#endif
}

}  // namespace jax_ring::cpu
