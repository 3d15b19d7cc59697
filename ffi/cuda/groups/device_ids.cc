// device_ids.cc: asks JAX for the ids of this process's GPUs, and remembers them.
#include "cuda/groups/device_ids.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace jax_ring::gpu {

void DeviceIds::set(Find find) {
  auto shared = std::make_shared<const Find>(std::move(find));
  const std::lock_guard<std::mutex> lock(mutex_);
  find_.swap(shared);
  ids_.clear();
  ++num_forgotten_;
}

int64_t DeviceIds::id_of(int ordinal) {
  std::shared_ptr<const Find> find;
  uint64_t before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (find_ == nullptr) return ordinal;
    if (const auto known = ids_.find(ordinal); known != ids_.end()) return known->second;
    find = find_;
    before = num_forgotten_;
  }
  const std::map<int, int64_t> ids = (*find)();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_forgotten_ == before) ids_ = ids;
  if (const auto known = ids.find(ordinal); known != ids.end()) return known->second;
  std::string listed;
  for (const auto& [each, id] : ids) listed += (listed.empty() ? "" : ", ") + std::to_string(each);
  throw std::runtime_error("a program runs on the GPU with CUDA ordinal " + std::to_string(ordinal) +
                           ", and JAX lists in this process those with the ordinals " +
                           (listed.empty() ? "(none)" : listed));
}

std::map<int64_t, int> DeviceIds::ordinals() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<int64_t, int> by_id;
  for (const auto& [ordinal, id] : ids_) by_id.emplace(id, ordinal);
  return by_id;
}

void DeviceIds::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ids_.clear();
  ++num_forgotten_;
}

}  // namespace jax_ring::gpu
