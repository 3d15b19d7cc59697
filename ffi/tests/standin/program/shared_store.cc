// shared_store.cc: a table in memory that processes share, and forked processes.
#include "tests/standin/program/shared_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "tests/standin/runtime/machine.h"

namespace jax_ring::standin {
namespace {

constexpr std::chrono::seconds kPatience{50};  // less than a test's time limit

class Spinning {
 public:
  explicit Spinning(std::atomic<int>& lock) : lock_(lock) {
    while (lock_.exchange(1, std::memory_order_acquire) != 0) std::this_thread::yield();
  }
  ~Spinning() { lock_.store(0, std::memory_order_release); }

 private:
  std::atomic<int>& lock_;
};

}  // namespace

SharedStore::SharedStore() {
  void* const memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap of a shared table failed");
  table_ = new (memory) Table;  // zeroed by the system
}

SharedStore::~SharedStore() { munmap(table_, sizeof(Table)); }

bool SharedStore::find(const std::string& key, std::string* value) {
  const Spinning locked(table_->lock);
  for (size_t i = 0; i < table_->count; ++i) {
    const Entry& entry = table_->entries[i];
    if (key != entry.key) continue;
    value->assign(entry.value, entry.value_bytes);
    return true;
  }
  return false;
}

gpu::KeyValueStore SharedStore::store(double timeout) {
  gpu::KeyValueStore store;
  store.publish = [this](const std::string& key, const std::string& value) {
    jitter();
    std::string found;
    if (find(key, &found)) throw std::runtime_error("the key " + key + " exists already");
    const Spinning locked(table_->lock);
    if (table_->count == kEntries || key.size() >= kKeyBytes || value.size() > kValueBytes) {
      throw std::runtime_error("the table is too small for " + key);
    }
    Entry& entry = table_->entries[table_->count];
    std::memcpy(entry.key, key.c_str(), key.size() + 1);
    std::memcpy(entry.value, value.data(), value.size());
    entry.value_bytes = value.size();
    ++table_->count;
  };
  store.fetch = [this, timeout](const std::string& key) {
    if (stage_of_thread == Stage::execute) Machine::instance().violate("execute asks the key-value store");
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
    std::string value;
    while (!find(key, &value)) {
      if (std::chrono::steady_clock::now() > until) throw std::runtime_error("no process published " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return value;
  };
  return store;
}

void SharedStore::meet(int number, int count) {
  table_->meetings[number].fetch_add(1);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (table_->meetings[number].load() < count) {
    if (std::chrono::steady_clock::now() > until) throw std::runtime_error("another process does not come");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<int> run_processes(int count, const std::function<void(int process)>& run) {
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int process = 0; process < count; ++process) {
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) {
      try {
        run(process);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "process " << process << ": " << error.what();
      }
      std::fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return statuses;
}

}  // namespace jax_ring::standin
