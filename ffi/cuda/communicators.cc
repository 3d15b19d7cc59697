// communicators.cc: creates each group's communicator once.
#include "cuda/communicators.h"

#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_ring::gpu {

Communicators& Communicators::instance() {
  static auto* const all =
      new Communicators;  // never destroyed: the CUDA runtime shuts down before static destructors run
  return *all;
}

void Communicators::set_process(int64_t process, KeyValueStore store) {
  std::lock_guard<std::mutex> lock(mutex_);
  process_ = process;
  store_ = std::move(store);
}

int64_t Communicators::process() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return process_;
}

void Communicators::set_gpus(Gpus* gpus) {
  std::lock_guard<std::mutex> lock(mutex_);
  gpus_ = gpus;
}

Gpus& Communicators::gpus() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (gpus_ == nullptr) {
    throw std::runtime_error(
        "this installation of jax_ring has no GPU kernels, so that it can compile programs for GPUs but not run them. "
        "Install it with JAX_RING_CUDA=ON where nvcc is.");
  }
  return *gpus_;
}

void Communicators::set_deadline(double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  deadline_ = seconds;
}

double Communicators::deadline() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return deadline_;
}

std::shared_ptr<Communicator> Communicators::get_or_create(const std::vector<Member>& members) {
  Gpus& memory = gpus();
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Communicator>& found = by_members_[members];
  if (found == nullptr) {
    std::ostringstream name;
    name << "jax_ring/" << generation_;
    for (const Member& member : members) name << "/" << member.process << "." << member.device;
    found = std::make_shared<Communicator>(members, process_, default_capacity(static_cast<int>(members.size())),
                                           name.str(), memory, store_);
  }
  return found;
}

void Communicators::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  by_members_.clear();
  ++generation_;
}

}  // namespace jax_ring::gpu
