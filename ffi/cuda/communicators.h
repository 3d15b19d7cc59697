// communicators.h: the communicators of this process, one per group of GPUs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/communicator.h"
#include "cuda/gpus.h"

namespace jax_ring::gpu {

// Communicators are created on first use.
class Communicators {
 public:
  static Communicators& instance();

  // The id of this process, and how it exchanges memory handles with the others. A single process needs no store.
  void set_process(int64_t process, KeyValueStore store);
  int64_t process() const;

  // The GPUs of this machine. Without them, programs can be compiled but not run.
  void set_gpus(Gpus* gpus);
  // Throws std::runtime_error if there are none.
  Gpus& gpus() const;

  void set_deadline(double seconds);
  double deadline() const;

  // The communicator of these members, by rank.
  std::shared_ptr<Communicator> get_or_create(const std::vector<Member>& members);

  // Drops all communicators, so that later programs create new ones; needed after a failure. All processes must do so.
  void reset();

 private:
  mutable std::mutex mutex_;
  int64_t process_ = 0;
  double deadline_ = 60;
  int64_t generation_ = 0;
  KeyValueStore store_;
  Gpus* gpus_ = nullptr;
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> by_members_;
};

}  // namespace jax_ring::gpu
