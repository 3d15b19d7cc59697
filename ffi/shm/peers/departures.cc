// departures.cc: passes questions to the looking thread, and its answers to those who ask.
#include "shm/peers/departures.h"

#include <chrono>

namespace jax_ring::shm {

Departures& Departures::instance() {
  // Never destroyed: threads may outlive main.
  static auto* const departures = new Departures;
  return *departures;
}

std::optional<CallFailure> Departures::of(int64_t process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = left_.find(process);
  return found == left_.end() ? std::nullopt : std::optional(found->second);
}

void Departures::ask(int64_t process) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (left_.count(process) != 0 || !questions_.insert(process).second) return;
  }
  asked_.notify_one();
}

std::vector<int64_t> Departures::await_questions(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  asked_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return ended_ || !questions_.empty(); });
  std::vector<int64_t> questions(questions_.begin(), questions_.end());
  questions_.clear();
  return questions;
}

void Departures::end_questions() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  asked_.notify_all();
}

void Departures::note(int64_t process, const CallFailure& how) {
  std::lock_guard<std::mutex> lock(mutex_);
  left_.emplace(process, how);
}

void Departures::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  questions_.clear();
  left_.clear();
}

}  // namespace jax_ring::shm
