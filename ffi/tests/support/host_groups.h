// host_groups.h: groups of GPUs in host memory, and a key-value store, for tests of their connection.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/groups/communicator.h"
#include "cuda/launch/plan.h"
#include "cuda/runtime/gpus.h"
#include "tests/support/peers.h"

namespace jax_ring::gpu {

// Host memory in place of a GPU's. Several threads may use it; it asserts that only connecting threads do.
class HostMemory : public Gpus {
 public:
  void* allocate(int device, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_allocations_left == 0) throw std::runtime_error("out of memory");
    if (num_allocations_left > 0) --num_allocations_left;
    events.push_back("allocate " + std::to_string(device));
    return keep(::operator new(bytes, std::align_val_t(128)), bytes);
  }
  void release(int device, void* memory) noexcept override { free_memory("release " + std::to_string(device), memory); }
  void* allocate_on_host(int, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return keep(::operator new(bytes, std::align_val_t(128)), bytes);
  }
  void release_on_host(int, void* memory) noexcept override { free_memory("release on host", memory); }
  bool can_access(int device, int peer) override { return severed.count({device, peer}) == 0; }
  void enable_access(int device, int peer) override { access_enabled.insert({device, peer}); }
  std::string export_handle(int, void* memory) override {
    if (!export_error.empty()) throw std::runtime_error(export_error);
    return std::string(reinterpret_cast<const char*>(&memory), sizeof(memory));
  }
  void* import_handle(int device, const std::string& handle) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!import_error.empty()) throw std::runtime_error(import_error);
    void* memory;
    std::memcpy(&memory, handle.data(), sizeof(memory));
    events.push_back("import " + std::to_string(device));
    ++imported;
    return memory;
  }
  void close_handle(int device, void*) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    events.push_back("close " + std::to_string(device));
    --imported;
  }
  void warm_up(int device) override { warm.insert(device); }
  std::vector<Identity> identities() override { return {}; }
  bool has_kernel(const KernelKey&) const override { return false; }
  void launch(const KernelKey&, const Call&, Stream) override { ADD_FAILURE() << "nothing launches here"; }
  bool is_capturing(Stream) override { return false; }

  std::set<std::pair<int, int>> severed, access_enabled;
  std::set<int> warm;
  int imported = 0;
  int num_allocations_left = -1;  // without limit
  std::string export_error, import_error;
  std::vector<std::string> events;
  size_t allocated() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_.size();
  }

 private:
  void* keep(void* memory, size_t bytes) {
    allocated_.insert(memory);
    return std::memset(memory, 0, bytes);
  }
  void free_memory(const std::string& event, void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events.push_back(event);
    EXPECT_EQ(allocated_.erase(memory), 1u);
    ::operator delete(memory, std::align_val_t(128));
  }
  mutable std::mutex mutex_;
  std::set<void*> allocated_;
};

// A key-value store shared by a program's processes.
class Table {
 public:
  KeyValueStore store() {
    return {[this](const std::string& key, const std::string& value) {
              std::lock_guard<std::mutex> lock(mutex_);
              if (!publish_error.empty()) throw std::runtime_error(publish_error);
              EXPECT_TRUE(values_.emplace(key, value).second) << key << " is published twice";
              changed_.notify_all();
            },
            [this](const std::string& key) {
              std::unique_lock<std::mutex> lock(mutex_);
              if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) {
                throw std::runtime_error("no process published " + key);
              }
              return values_[key];
            }};
  }
  std::shared_ptr<const KeyValueStore> shared() { return std::make_shared<const KeyValueStore>(store()); }
  size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_.size();
  }
  std::chrono::duration<double> timeout = cpu::testing::kTestTimeout;
  std::string publish_error;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

constexpr double kSeconds = 20;

inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

// A group of one process, connected in lane 0.
struct Connected : Communicator {
  template <class... Arguments>
  explicit Connected(Arguments&&... arguments) : Communicator(std::forward<Arguments>(arguments)...) {
    connect(0, kSeconds);
  }
};

inline std::vector<Member> one_process(int num_ranks) {
  std::vector<Member> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back({0, rank});
  return members;
}

// Does the work of these ranks' kernels, with one thread per team. thresholds_of: by rank.
inline void run(const Communicator& communicator, const CallSite& site, cpu::testing::PeerCall& call,
                const std::vector<Thresholds>& thresholds_of = {}, double deadline_seconds = 20) {
  std::vector<std::thread> threads;
  for (int rank : communicator.local_ranks()) {
    threads.emplace_back([&, rank] {
      const Thresholds thresholds =
          thresholds_of.empty() ? default_thresholds(communicator.num_ranks()) : thresholds_of[rank];
      std::vector<Buffer> buffers;
      for (size_t i = 0; i < call.counts.size(); ++i) {
        buffers.push_back({call.inputs[rank][i].data(), call.outputs[rank][i].data(), call.inputs[rank][i].size()});
      }
      for (const Launch& launch :
           launches_of(communicator, rank, site, thresholds, call.dtype, buffers, deadline_seconds)) {
        std::vector<std::thread> teams;
        for (int cta = 0; cta < communicator.capacity().num_ctas; ++cta) {
          teams.emplace_back([&, cta] {
            std::minstd_rand random(static_cast<unsigned>(cta + 1));
            cpu::testing::team_function(launch.kernel.dtype, launch.kernel.op, launch.kernel.algorithm)(
                launch.call.self, launch.call.message, launch.call.plan, cta, cpu::testing::JitteryTeam(random));
          });
        }
        for (std::thread& team : teams) team.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jax_ring::gpu
