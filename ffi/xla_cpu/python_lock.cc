// python_lock.cc: a thread that takes the interpreter's lock, so that others need not wait for it long.
#include "xla_cpu/python_lock.h"

#include <Python.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "base/threads.h"

namespace jax_ring::cpu {
namespace {

// A thread in Python may keep the lock as long as it likes, and wait for an execution meanwhile.
constexpr std::chrono::milliseconds kLongestWait{200};

class PythonLock final : public LaunchLock {
 public:
  bool acquire() override {
    if (!Py_IsInitialized()) return false;
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
