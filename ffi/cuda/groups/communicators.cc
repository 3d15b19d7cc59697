// communicators.cc: creates each group's communicator once, and retires old ones.
#include "cuda/groups/communicators.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_ring::gpu {
namespace {

std::set<int64_t> processes_of(const Communicator& communicator) {
  std::set<int64_t> processes;
  for (const Member& member : communicator.members()) processes.insert(member.process);
  return processes;
}

// Whether the user asks for multicast. It has never run on a GPU, so it is off by default.
bool is_multicast_requested() {
  const char* const requested = std::getenv("JAX_RING_MULTICAST");
  const std::string value = requested == nullptr ? "" : requested;
  if (value == "1") return true;
  if (value.empty() || value == "0") return false;
  throw std::runtime_error("JAX_RING_MULTICAST must be 1 or 0, got '" + value + "'");
}

}  // namespace

Communicators& Communicators::instance() {
  static auto* const all =
      new Communicators;  // never destroyed: the CUDA runtime shuts down before static destructors run
  return *all;
}

Gpus& Communicators::gpus() const {
  Gpus* const gpus = gpus_.load(std::memory_order_acquire);
  if (gpus == nullptr) {
    throw std::runtime_error(
        "this installation of jax_ring has no GPU kernels, so that it can compile programs for GPUs but not run them. "
        "Install it with JAX_RING_CUDA=ON where nvcc is.");
  }
  return *gpus;
}

std::shared_ptr<Communicator> Communicators::get_or_create(const std::vector<Member>& members) {
  Gpus& memory = gpus();
  std::map<int64_t, int> ordinals = device_ids_.ordinals();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Communicator>& found = by_members_[members];
  if (found == nullptr) {
    std::ostringstream name;
    name << "jax_ring/gpus/" << generation_;
    for (const Member& member : members) name << "/" << member.process << "." << member.device;
    try {
      found = std::make_shared<Communicator>(members, process(), default_capacity(static_cast<int>(members.size())),
                                             name.str(), memory, store_, std::move(ordinals),
                                             members.size() > 1 && is_multicast_requested());
    } catch (...) {
      by_members_.erase(members);
      throw;
    }
  }
  return found;
}

void Communicators::connect(Communicator& communicator, int lane) {
  if (communicator.is_connected(lane)) return;
  communicator.connect(lane, deadline());
  if (communicator.is_in_one_process()) return;
  // In this generation every process of this group has published its handles. Before that, it closed its groups of
  // earlier generations, so nobody maps that memory of this process any more. Free it later, when no program is
  // running: freeing waits for a GPU's work, perhaps for a kernel that waits for this thread's GPU.
  const std::set<int64_t> processes = processes_of(communicator);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (communicator.is_retired()) return;
  for (Retired& each : retired_) {
    const std::set<int64_t> theirs = processes_of(*each.communicator);
    if (each.runtime == runtime_ && std::includes(processes.begin(), processes.end(), theirs.begin(), theirs.end())) {
      each.is_mapped = false;
    }
  }
}

// Close first and count afterwards, so that no process can learn of a generation before the earlier ones are closed.
void Communicators::reset() {
  retire_all();
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> old;
  uint64_t runtime;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    old.swap(by_members_);
    runtime = runtime_;
    ++generation_;
  }
  keep(old, runtime);
}

void Communicators::set_process(int64_t process, KeyValueStore store) {
  retire_all();
  auto shared = std::make_shared<const KeyValueStore>(std::move(store));
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> old;
  uint64_t runtime;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    process_.store(process, std::memory_order_relaxed);
    store_.swap(shared);  // drop the old one without the lock, since that may wait for Python
    old.swap(by_members_);
    runtime = runtime_++;
    generation_ = 0;
  }
  device_ids_.forget();
  keep(old, runtime);
}

// Also frees memory that an earlier call left and nobody maps any more.
void Communicators::retire_all() {
  for (const auto& each : all()) each->retire();
  std::vector<std::shared_ptr<Communicator>> unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto first =
        std::partition(retired_.begin(), retired_.end(), [](const Retired& each) { return each.is_mapped; });
    for (auto each = first; each != retired_.end(); ++each) unused.push_back(std::move(each->communicator));
    retired_.erase(first, retired_.end());
  }
  for (const auto& each : unused) each->free_all();
}

// Keeps memory alive that other processes may map, and that a destructor would free. Processes of an earlier runtime
// announce nothing any more, so memory that they map stays until this process exits.
void Communicators::keep(const std::map<std::vector<Member>, std::shared_ptr<Communicator>>& old, uint64_t runtime) {
  for (const auto& [members, communicator] : old) {
    communicator->retire();
    if (communicator->is_in_one_process()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    retired_.push_back({communicator, runtime});
  }
}

std::vector<std::shared_ptr<Communicator>> Communicators::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& [members, communicator] : by_members_) all.push_back(communicator);
  return all;
}

std::vector<std::string> Communicators::failures() const {
  std::vector<std::string> texts;
  for (const auto& each : all()) {
    if (const auto failure = each->call_failure(deadline())) texts.push_back(failure->message());
  }
  return texts;
}

std::vector<std::string> Communicators::unreported_failures() {
  std::vector<std::string> texts;
  for (const auto& each : all()) {
    const auto failure = each->call_failure(deadline());
    if (failure && each->should_report()) texts.push_back(failure->message());
  }
  return texts;
}

}  // namespace jax_ring::gpu
