// shared_store.h: a key-value store that forked processes share, and the processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cuda/groups/group.h"

namespace jax_ring::standin {

// Lies in memory that processes inherit when forked. Like jax.distributed's store, it refuses an existing key.
class SharedStore {
 public:
  SharedStore();
  ~SharedStore();
  SharedStore(const SharedStore&) = delete;
  SharedStore& operator=(const SharedStore&) = delete;

  // timeout: seconds that fetch waits for a key, before it throws std::runtime_error.
  gpu::KeyValueStore store(double timeout);

  // For the tests themselves: waits until `count` processes have called it with this number, below kMeetings.
  static constexpr int kMeetings = 16;
  void meet(int number, int count);

 private:
  static constexpr size_t kEntries = 512, kKeyBytes = 256, kValueBytes = 1024;
  struct Entry {
    size_t value_bytes;
    char key[kKeyBytes], value[kValueBytes];
  };
  struct Table {
    std::atomic<int> lock;
    std::atomic<int> meetings[kMeetings];
    size_t count;
    Entry entries[kEntries];
  };
  bool find(const std::string& key, std::string* value);

  Table* table_;
};

// Runs each process, by number, in a process of its own, and waits for all. Returns their exit statuses: 0 if nothing
// in it failed. The caller must have no other threads.
std::vector<int> run_processes(int count, const std::function<void(int process)>& run);

}  // namespace jax_ring::standin
