// watchdog.cc: the thread that fails expired rendezvous.
#include "cpu/rendezvous/watchdog.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/cores.h"
#include "base/pauses.h"
#include "base/threads.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "recorder/flight_table.h"

namespace jax_ring::cpu {
namespace {

// Run ids are never reused, so old failures can be dropped.
constexpr size_t kMaxFailures = 256;
constexpr double kChecksPerDeadline = 10;
constexpr double kMaxCheckInterval = 10;  // seconds
// When nothing arrives for the first time span, all executions in flight count as arrived. The second limits the whole
// wait. Both in parts of a deadline.
constexpr double kQuiet = 0.05;
constexpr double kLongestDrain = 0.2;
// A barrier outlasts calls in which its missing ranks may be waiting.
constexpr int kDeadlinesOfBarrier = 2;

bool has_run_for(std::chrono::duration<double> limit, Clock::time_point since, Clock::time_point now) {
  return Pauses::instance().run_since(since, now) >= limit;
}

// Empty if the runtime's pool has enough threads: one for the execution and one for a launch on each device.
std::string advice_on_threads(int num_devices) {
  const char* const nproc = std::getenv("NPROC");
  const int num_threads = nproc != nullptr ? std::atoi(nproc) : num_cores();
  if (num_threads >= 2 * num_devices) return "";
  return " If the program launches steps without awaiting results, launches may hold the threads that the missing "
         "ranks need: await one now and then (jax.block_until_ready), or set NPROC=" +
         std::to_string(2 * num_devices) + " in the environment before JAX is imported.";
}

}  // namespace

Watchdog& Watchdog::instance() {
  // Never destroyed: the thread may outlive main.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

void Watchdog::watch(RendezvousMap* rendezvous_map) {
  std::lock_guard<std::mutex> lock(watched_mutex_);
  if (!started_) {
    start_detached("fails calls at their deadline", [this] { run(); });
    started_ = true;
  }
  watched_.push_back(rendezvous_map);
}

void Watchdog::unwatch(RendezvousMap* rendezvous_map) {
  std::lock_guard<std::mutex> lock(watched_mutex_);
  watched_.erase(std::remove(watched_.begin(), watched_.end(), rendezvous_map), watched_.end());
  std::lock_guard<std::mutex> failures_lock(failures_mutex_);
  failing_.erase(rendezvous_map);
}

void Watchdog::set_deadline(double seconds) {
  {
    std::lock_guard<std::mutex> lock(watched_mutex_);
    deadline_seconds_.store(seconds, std::memory_order_relaxed);
  }
  wake_.notify_all();
}

void Watchdog::set_launch_lock(std::unique_ptr<LaunchLock> lock) {
  std::lock_guard<std::mutex> watched_lock(watched_mutex_);
  launch_lock_ = std::move(lock);
}

void Watchdog::record_failure(int64_t run_id, const CallFailurePtr& why) {
  std::lock_guard<std::mutex> lock(failures_mutex_);
  record_failure_locked(run_id, why);
}

void Watchdog::record_failure_locked(int64_t run_id, const CallFailurePtr& why) {
  if (failure_locked(run_id) != nullptr) return;
  failures_.emplace_back(run_id, why);
  if (failures_.size() > kMaxFailures) failures_.pop_front();
  any_failure_.store(true, std::memory_order_release);
}

CallFailurePtr Watchdog::failure(int64_t run_id) const {
  if (!any_failure_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard<std::mutex> lock(failures_mutex_);
  return failure_locked(run_id);
}

CallFailurePtr Watchdog::failure(int64_t run_id, RendezvousMap* rendezvous_map) {
  if (!any_failure_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard<std::mutex> lock(failures_mutex_);
  if (CallFailurePtr known = failure_locked(run_id)) return known;
  if (failing_.count(rendezvous_map) == 0) return nullptr;
  record_failure_locked(run_id, failure_in_flight_);
  ++num_failed_in_flight_;
  return failure_in_flight_;
}

void Watchdog::abandon(const std::string& why) {
  std::vector<RendezvousPtr> open;
  {
    std::lock_guard<std::mutex> lock(watched_mutex_);
    for (RendezvousMap* rendezvous_map : watched_) {
      for (auto& rendezvous : rendezvous_map->remove_if([](const Rendezvous&) { return true; })) {
        open.push_back(std::move(rendezvous));
      }
    }
    std::lock_guard<std::mutex> failures_lock(failures_mutex_);
    failures_.clear();
    failing_.clear();
    any_failure_.store(false, std::memory_order_release);
  }
  if (open.empty()) return;
  const CallFailurePtr failure = numbered(CallFailure::of(CallFailure::Kind::released, why));
  for (auto& rendezvous : open) CompletionThreads::instance().complete(std::move(rendezvous), failure);
}

CallFailurePtr Watchdog::failure_locked(int64_t run_id) const {
  for (const auto& [failed_run, why] : failures_) {
    if (failed_run == run_id) return why;
  }
  return nullptr;
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(watched_mutex_);
  for (;;) {
    const std::chrono::duration<double> interval(std::min(deadline() / kChecksPerDeadline, kMaxCheckInterval));
    Pauses::instance().look(Clock::now(), std::chrono::duration_cast<Clock::duration>(interval));
    wake_.wait_for(lock, interval);
    lock.unlock();
    check_deadlines();
    lock.lock();
  }
}

void Watchdog::check_deadlines() {
  // Record it before anyone can learn of a failure.
  LaunchLock* const launches = lock_of_expired();
  const bool is_locked = launches != nullptr && launches->acquire();
  fail_expired(is_locked);
  if (!is_locked) return;
  await_those_in_flight();
  launches->release();
}

LaunchLock* Watchdog::lock_of_expired() {
  std::lock_guard<std::mutex> lock(watched_mutex_);
  const auto limit = std::chrono::duration<double>(deadline());
  const auto now = Clock::now();
  const bool expired = std::any_of(watched_.begin(), watched_.end(), [&](RendezvousMap* rendezvous_map) {
    return rendezvous_map->has_deadline() && rendezvous_map->has_open([&](const Rendezvous& rendezvous) {
      return has_run_for(limit, rendezvous.start_time, now);
    });
  });
  return expired ? launch_lock_.get() : nullptr;
}

// Waits until no more of the failing executions arrive.
void Watchdog::await_those_in_flight() {
  const std::chrono::duration<double> quiet(kQuiet * deadline()), longest(kLongestDrain * deadline());
  const auto begin = Clock::now();
  int64_t before = -1;
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(failures_mutex_);
      if (num_failed_in_flight_ == before || Clock::now() - begin > longest) {
        failing_.clear();
        return;
      }
      before = num_failed_in_flight_;
    }
    std::this_thread::sleep_for(quiet);
  }
}

void Watchdog::fail_expired(bool with_those_in_flight) {
  std::vector<RendezvousPtr> expired;
  std::vector<CallFailurePtr> reasons;
  std::string report;
  {
    std::lock_guard<std::mutex> lock(watched_mutex_);
    const auto limit = std::chrono::duration<double>(deadline());
    const auto now = Clock::now();
    std::vector<RendezvousMap*> maps;  // the maps of each expired rendezvous
    for (RendezvousMap* rendezvous_map : watched_) {
      if (!rendezvous_map->has_deadline()) continue;
      for (auto& rendezvous :
           rendezvous_map->remove_if([&](const Rendezvous& m) { return has_run_for(limit, m.start_time, now); })) {
        expired.push_back(std::move(rendezvous));
        maps.push_back(rendezvous_map);
      }
    }
    // Where else than in the call of `except` a partition waits: in another expired or an open one.
    const auto place_of = [&](int64_t run_id, int64_t partition,
                              const RendezvousMap* except) -> std::optional<std::string> {
      for (size_t i = 0; i < expired.size(); ++i) {
        if (maps[i] != except && expired[i]->run_id == run_id && maps[i]->has_arrived(*expired[i], partition)) {
          return maps[i]->place();
        }
      }
      for (RendezvousMap* other : watched_) {
        if (other != except && other->is_waiting(run_id, partition)) return other->place();
      }
      return std::nullopt;
    };
    for (size_t i = 0; i < expired.size(); ++i) {
      CallFailure failure = maps[i]->failure_of_missing_ranks(
          *expired[i], limit, [&](int64_t partition) { return place_of(expired[i]->run_id, partition, maps[i]); });
      if (launches_hold_threads_.load(std::memory_order_relaxed)) {
        failure.text += advice_on_threads(maps[i]->groups().num_local());
      }
      failure.text += flight::last_calls_of_missing_ranks(expired[i]->entry);
      reasons.push_back(numbered(std::move(failure)));
    }
    // Log it with the error: nobody may ever await the results.
    if (!expired.empty()) report = "jax_ring: " + reasons.front()->message() + "\n" + flight::table_of_ranks();
    if (with_those_in_flight && !expired.empty()) fail_later_executions(expired, *reasons.front());
    for (size_t i = 0; i < expired.size(); ++i) record_failure(expired[i]->run_id, reasons[i]);
    // Failed executions cannot complete their other open rendezvous either. A communicator may have failed them.
    for (RendezvousMap* rendezvous_map : watched_) {
      for (auto& rendezvous :
           rendezvous_map->remove_if([&](const Rendezvous& m) { return failure(m.run_id) != nullptr; })) {
        reasons.push_back(failure(rendezvous->run_id));
        expired.push_back(std::move(rendezvous));
      }
    }
    release_barriers(kDeadlinesOfBarrier * limit);
  }
  // Before the calls fail: that may end the process at once.
  flight::Recorder::instance().print_once(report);
  for (size_t i = 0; i < expired.size(); ++i)
    CompletionThreads::instance().complete(std::move(expired[i]), std::move(reasons[i]));
}

// Requires watched_mutex_.
void Watchdog::fail_later_executions(const std::vector<RendezvousPtr>& failed, CallFailure why) {
  std::set<RendezvousMap*> calls;
  for (RendezvousMap* rendezvous_map : watched_) {
    const int64_t run_id = rendezvous_map->latest_run();
    if (std::any_of(failed.begin(), failed.end(), [&](const auto& one) { return one->run_id == run_id; })) {
      calls.insert(rendezvous_map);
    }
  }
  why.text = "In flight when an earlier execution of this program failed: " + why.text;
  std::lock_guard<std::mutex> lock(failures_mutex_);
  failing_ = std::move(calls);
  failure_in_flight_ = numbered(std::move(why));
}

// Releases ranks that have waited at a barrier this long, if no other rank waits in a call: these may be computing, or
// have failed for reasons of their own.
// computing, or have failed for reasons of their own.
void Watchdog::release_barriers(std::chrono::duration<double> limit) {
  const auto now = Clock::now();
  std::set<int64_t> waiting;
  for (RendezvousMap* rendezvous_map : watched_) {
    if (rendezvous_map->has_deadline()) rendezvous_map->add_open_runs(waiting);
  }
  for (RendezvousMap* rendezvous_map : watched_) {
    if (rendezvous_map->has_deadline()) continue;
    for (auto& rendezvous : rendezvous_map->remove_if([&](const Rendezvous& m) {
           return has_run_for(limit, m.start_time, now) && waiting.count(m.run_id) == 0;
         })) {
      CompletionThreads::instance().complete(std::move(rendezvous));
    }
  }
}

}  // namespace jax_ring::cpu
