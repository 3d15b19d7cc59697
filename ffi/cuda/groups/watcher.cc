// watcher.cc: looks for failures of GPU calls on a thread of its own.
#include "cuda/groups/watcher.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/threads.h"
#include "cuda/groups/communicators.h"

namespace jax_ring::gpu {

Watcher::Watcher(std::function<void()> look)
    : thread_(start_thread("reports failures of GPU calls", [this, look = std::move(look)] {
        std::unique_lock<std::mutex> lock(mutex_);
        for (bool last = false; !last;) {
          last = changed_.wait_for(lock, std::chrono::milliseconds(300), [&] { return stopping_; });
          lock.unlock();
          look();
          lock.lock();
        }
      })) {}

Watcher::~Watcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void start_reporting_failures() {
  static std::once_flag started;
  std::call_once(started, [] {
    static Watcher* watcher = new Watcher([] {
      for (const std::string& text : Communicators::instance().unreported_failures()) {
        std::fprintf(stderr, "jax_ring: %s\n", text.c_str());
      }
    });
    static const pid_t process = getpid();
    // Registered after the CUDA runtime's own exit handlers, so it runs before them, while failure records are still
    // readable. A forked child does not have the thread, and would wait for it.
    std::atexit([] {
      if (getpid() == process) delete watcher;
    });
  });
}

}  // namespace jax_ring::gpu
