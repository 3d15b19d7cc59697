// watcher.h: a thread that reports failures of GPU calls as soon as they are recorded.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace jax_ring::gpu {

// A kernel cannot raise an error; the group's next call does. Without a next call, as after a program's last step,
// nobody would learn of the failure.
class Watcher {
 public:
  // Calls `look` every few tenths of a second, and once more at the end. Throws std::runtime_error if the thread cannot
  // start.
  explicit Watcher(std::function<void()> look);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

// Starts a watcher, once, that writes failures of this process's groups to standard error until the program exits.
void start_reporting_failures();

}  // namespace jax_ring::gpu
