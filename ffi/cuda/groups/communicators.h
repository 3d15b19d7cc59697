// communicators.h: the communicators of this process, one per group of GPUs.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/groups/communicator.h"
#include "cuda/groups/device_ids.h"
#include "cuda/runtime/gpus.h"

namespace jax_ring::gpu {

// Its mutex guards only the maps: no wait happens under it. State that a call needs in every execution is atomic.
class Communicators {
 public:
  static Communicators& instance();

  // This process's id, and its means of exchanging memory handles with other processes. A single process needs no
  // store. A new runtime has other processes, so this retires all communicators.
  void set_process(int64_t process, KeyValueStore store);
  int64_t process() const { return process_.load(std::memory_order_relaxed); }

  // This machine's GPUs. Without GPUs, programs can be compiled but not run.
  void set_gpus(Gpus* gpus) { gpus_.store(gpus, std::memory_order_release); }
  // Throws std::runtime_error if there are none.
  Gpus& gpus() const;

  void set_deadline(double seconds) { deadline_.store(seconds, std::memory_order_relaxed); }
  double deadline() const { return deadline_.load(std::memory_order_relaxed); }

  DeviceIds& device_ids() { return device_ids_; }

  // The communicator of these members, by rank. Some of them belong to this process.
  std::shared_ptr<Communicator> get_or_create(const std::vector<Member>& members);

  // Connects a lane; see Connection.
  void connect(Communicator& communicator, int lane);

  // Retires all communicators, so that later programs create new ones; needed after a failure. All processes must do
  // so, while no program is running.
  void reset();

  // The failures of all groups, as texts.
  std::vector<std::string> failures() const;
  // Failures that were not returned before.
  std::vector<std::string> unreported_failures();

 private:
  // A communicator with mailboxes that other processes may still map.
  struct Retired {
    std::shared_ptr<Communicator> communicator;
    uint64_t runtime;
    bool is_mapped = true;  // as far as this process knows
  };

  void retire_all();
  void keep(const std::map<std::vector<Member>, std::shared_ptr<Communicator>>& old, uint64_t runtime);
  std::vector<std::shared_ptr<Communicator>> all() const;

  std::atomic<int64_t> process_{0};
  std::atomic<double> deadline_{60};
  std::atomic<Gpus*> gpus_{nullptr};
  DeviceIds device_ids_;

  mutable std::mutex mutex_;
  uint64_t runtime_ = 0;    // how often the process has joined a runtime
  int64_t generation_ = 0;  // how often groups were forgotten in this runtime
  std::shared_ptr<const KeyValueStore> store_;
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> by_members_;
  std::vector<Retired> retired_;
};

}  // namespace jax_ring::gpu
