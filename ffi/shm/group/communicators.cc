// communicators.cc: creates each group's communicator once.
#include "shm/group/communicators.h"

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/siphash.h"
#include "base/threads.h"
#include "cpu/rendezvous/watchdog.h"
#include "shm/memory/names.h"
#include "shm/memory/shared_memory.h"
#include "shm/peers/departures.h"

namespace jax_ring::shm {
namespace {

// Empty if unset.
std::string host_id() {
  const char* const named = std::getenv("JAX_RING_HOST_ID");
  return named == nullptr ? "" : named;
}

}  // namespace

Communicators& Communicators::instance() {
  // Never destroyed: threads may outlive main.
  static auto* const all = new Communicators;
  return *all;
}

void Communicators::join(int64_t process, const std::string& label, const std::string& key) {
  static_cast<void>(SipHash(key));                                   // throws before anything has changed
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> old;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(mutex_);
  process_ = process;
  if (key == key_) return;
  label_ = label;
  key_ = key;
  aborted_.reset();
  old.swap(by_members_);
  next_indices_.clear();
  run_counters_.clear();
  Departures::instance().clear();
}

std::vector<std::shared_ptr<Communicator>> Communicators::all() const {
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const auto& [members, communicator] : by_members_) communicators.push_back(communicator);
  return communicators;
}

void Communicators::abort(const CallFailure& how) {
  std::vector<std::shared_ptr<Communicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return;
    aborted_ = how;
    communicators = all();
  }
  for (const auto& communicator : communicators) communicator->leave(how);
}

void Communicators::reset() {
  abort(CallFailure::departure("has left for another set of processes"));
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> old;  // destroyed after the lock is released
  {
    std::lock_guard<std::mutex> lock(mutex_);
    key_.clear();
    aborted_.reset();
    old.swap(by_members_);
    next_indices_.clear();
    run_counters_.clear();
  }
  cpu::Watchdog::instance().abandon("this process has left its groups of processes");
  Departures::instance().clear();
}

bool Communicators::has_groups() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !by_members_.empty();
}

int64_t Communicators::process() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return process_;
}

std::shared_ptr<Communicator> Communicators::get_or_create(const std::vector<Member>& members) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (key_.empty()) {
    throw std::logic_error(
        "this program is for several processes, and jax_ring does not know the others. It discovers them when it "
        "lowers a program: call jax.distributed.initialize() first, and do not load programs that were compiled "
        "elsewhere");
  }
  std::shared_ptr<Communicator>& found = by_members_[members];
  if (found == nullptr) {
    std::vector<int64_t> processes, numbers;
    for (const Member& member : members) {
      processes.push_back(member.first);
      numbers.insert(numbers.end(), {member.first, member.second});
    }
    Group group(processes, process_);
    Capacities capacities = capacities_of(group);
    std::vector<int64_t> ids;
    for (int process = 0; process < group.num_processes(); ++process) ids.push_back(group.process_id(process));
    auto segments = std::make_unique<SharedMemory>(
        Names(label_, key_, std::move(numbers)), std::move(ids), group.self(),
        [] { return cpu::Watchdog::instance().deadline(); }, host_id());
    watch_idle_memory();
    found = std::make_shared<Communicator>(std::move(group), std::move(capacities), std::move(segments));
    if (aborted_) found->leave(*aborted_);
  }
  return found;
}

void Communicators::release_idle_memory() {
  std::vector<std::shared_ptr<Communicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    communicators = all();
  }
  for (const auto& communicator : communicators) communicator->release_idle_memory();
}

// Requires mutex_.
void Communicators::watch_idle_memory() {
  if (std::exchange(watches_idle_memory_, true)) return;
  try {
    start_detached("gives idle memory back", [this] {
      for (;;) {
        std::this_thread::sleep_for(kIdleTime);
        release_idle_memory();
      }
    });
  } catch (const std::runtime_error&) {
    // Otherwise idle groups keep their memory.
  }
}

int64_t Communicators::next_index(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_indices_[key]++;
}

void Communicators::count_builds(int change) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_builds_ += change;
  if (num_builds_ == 0) next_indices_.clear();
}

std::shared_ptr<RunCounter> Communicators::run_counter(uint64_t identity) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<RunCounter>& found = run_counters_[identity];
  if (found == nullptr) found = std::make_shared<RunCounter>();
  return found;
}

}  // namespace jax_ring::shm
