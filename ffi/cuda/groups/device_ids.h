// device_ids.h: JAX's ids of the GPUs of this process.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace jax_ring::gpu {

// Programs name GPUs by JAX's ids, which are unique among all processes. XLA names an execution's GPU by its CUDA
// ordinal.
class DeviceIds {
 public:
  // The ids of this process's GPUs, by CUDA ordinal. It may wait for Python, so call it without a lock.
  using Find = std::function<std::map<int, int64_t>()>;

  // Without it the ids are the ordinals, as in a single process that sees all GPUs.
  void set(Find find);

  // Throws std::runtime_error if JAX knows no such GPU.
  int64_t id_of(int ordinal);

  // By id, as far as known; empty if the ids are the ordinals. Complete once `id_of` has succeeded.
  std::map<int64_t, int> ordinals() const;

  // A later runtime may number the GPUs differently.
  void forget();

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Find> find_;
  std::map<int, int64_t> ids_;  // by ordinal
  uint64_t num_forgotten_ = 0;
};

}  // namespace jax_ring::gpu
