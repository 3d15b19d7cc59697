// communicators.h: the GPU groups of this process, and what they have in common.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/communicator.h"
#include "cuda/peer_memory.h"

namespace jax_ring::gpu {

// The communicators of this process, made when they are first asked for.
class Communicators {
 public:
  static Communicators& instance();

  // Who this process is, and how it meets the others. Without others there is nothing to exchange.
  void set_process(int64_t process, KeyValueStore store);
  int64_t process() const;

  void set_deadline(double seconds);
  double deadline() const;

  // The communicator of these members.
  std::shared_ptr<Communicator> get_or_create(const std::vector<Member>& members);

  // Makes new communicators from now on, as is necessary after a failure. All processes must do so together.
  void reset();

 private:
  mutable std::mutex mutex_;
  int64_t process_ = 0;
  double deadline_ = 60;
  int64_t generation_ = 0;
  KeyValueStore store_;
  std::unique_ptr<PeerMemory> memory_;
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> by_members_;
};

}  // namespace jax_ring::gpu
