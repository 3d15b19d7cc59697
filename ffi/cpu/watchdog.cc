// watchdog.cc: the thread that looks for late meetings.
#include "cpu/watchdog.h"

#include <algorithm>
#include <thread>

#include "cpu/relay.h"
#include "cpu/rendezvous.h"

namespace jax_ring::cpu {
namespace {

// Executions are numbered once and never again, so that old failures can be forgotten.
constexpr size_t kFailuresKept = 256;
constexpr double kLooksPerDeadline = 10;
constexpr double kLongestPause = 10;  // seconds

}  // namespace

Watchdog& Watchdog::instance() {
  // Never destroyed: the thread may outlive main.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

void Watchdog::watch(Rendezvous* rendezvous) {
  std::lock_guard<std::mutex> lock(watched_mutex_);
  watched_.push_back(rendezvous);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
}

void Watchdog::forget(Rendezvous* rendezvous) {
  std::lock_guard<std::mutex> lock(watched_mutex_);
  watched_.erase(std::remove(watched_.begin(), watched_.end(), rendezvous), watched_.end());
}

void Watchdog::set_deadline(double seconds) {
  {
    std::lock_guard<std::mutex> lock(watched_mutex_);
    deadline_seconds_.store(seconds, std::memory_order_relaxed);
  }
  wake_.notify_all();
}

void Watchdog::note_failure(int64_t run_id, const std::string& why) {
  std::lock_guard<std::mutex> lock(failures_mutex_);
  if (failure_locked(run_id) != nullptr) return;
  failures_.emplace_back(run_id, why);
  if (failures_.size() > kFailuresKept) failures_.pop_front();
  any_failure_.store(true, std::memory_order_release);
}

std::optional<std::string> Watchdog::failure(int64_t run_id) const {
  if (!any_failure_.load(std::memory_order_acquire)) return std::nullopt;
  std::lock_guard<std::mutex> lock(failures_mutex_);
  const std::string* why = failure_locked(run_id);
  return why == nullptr ? std::nullopt : std::optional(*why);
}

const std::string* Watchdog::failure_locked(int64_t run_id) const {
  for (const auto& [failed_run, why] : failures_) {
    if (failed_run == run_id) return &why;
  }
  return nullptr;
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(watched_mutex_);
  for (;;) {
    const std::chrono::duration<double> pause(std::min(deadline() / kLooksPerDeadline, kLongestPause));
    wake_.wait_for(lock, pause);
    lock.unlock();
    look_around();
    lock.lock();
  }
}

void Watchdog::look_around() {
  std::vector<MeetingPtr> late;
  std::vector<std::string> reasons;
  {
    std::lock_guard<std::mutex> lock(watched_mutex_);
    const auto limit = std::chrono::duration<double>(deadline());
    const auto now = Clock::now();
    for (Rendezvous* rendezvous : watched_) {
      for (auto& meeting : rendezvous->take([&](const Meeting& m) { return now - m.began >= limit; })) {
        reasons.push_back(rendezvous->describe_absence(*meeting, limit));
        late.push_back(std::move(meeting));
      }
    }
    if (late.empty()) return;
    for (size_t i = 0; i < late.size(); ++i) note_failure(late[i]->run_id, reasons[i]);
    // The same executions' other open meetings: nobody will complete them either.
    for (Rendezvous* rendezvous : watched_) {
      for (auto& meeting : rendezvous->take([&](const Meeting& m) { return failure(m.run_id).has_value(); })) {
        reasons.push_back(*failure(meeting->run_id));
        late.push_back(std::move(meeting));
      }
    }
  }
  for (size_t i = 0; i < late.size(); ++i) Relay::instance().tell(std::move(late[i]), std::move(reasons[i]));
}

}  // namespace jax_ring::cpu
