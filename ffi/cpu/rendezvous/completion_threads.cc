// completion_threads.cc: the threads that run completions, and the watcher that detects slow ones.
#include "cpu/rendezvous/completion_threads.h"

#include <sys/prctl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace jax_ring::cpu {
namespace {

// After the last use the watcher keeps checking every kStragglerDelay for this long, then sleeps until woken. So a loop
// of collectives never pays for waking it.
constexpr std::chrono::milliseconds kWatcherIdleTime(20);

JAX_RING_THREAD_LOCAL(bool, is_completion_thread);
// Whether completions wait for the one that this thread runs.
JAX_RING_THREAD_LOCAL(bool, holds_completions);

// Lets ranks that wait in their calls go on. Returns whether there were any. Ranks that move to another thread stay.
bool release_waiting(Rendezvous& rendezvous) {
  bool any = false;
  for (size_t rank = 0; rank < rendezvous.waiting.size(); ++rank) {
    if (rendezvous.waiting[rank] == nullptr) continue;
    const WaitingRank::Released released = rendezvous.waiting[rank]->release();
    if (released == WaitingRank::Released::moves) continue;
    rendezvous.waiting[rank] = nullptr;
    if (released == WaitingRank::Released::has_left) continue;
    rendezvous.done[rank] = Completion();
    any = true;
  }
  return any;
}

// Unless a pool thread has taken over the rank.
void run_completion(Rendezvous& rendezvous, int rank, const CallFailure* error) {
  Completion done = std::move(rendezvous.done[rank]);
  WaitingRank* const waiting = rendezvous.waiting.empty() ? nullptr : rendezvous.waiting[rank].get();
  if (waiting == nullptr || waiting->take_over()) done(error);
}

}  // namespace

bool CompletionThreads::may_wait() { return !holds_completions; }

CompletionThreads& CompletionThreads::instance() {
  return immortal([] { return new CompletionThreads; });
}

void CompletionThreads::start() {
  std::lock_guard<Mutex> lock(mutex_);
  start_locked();
}

// Requires mutex_.
void CompletionThreads::start_locked() {
  if (!worker_started_) {
    start_detached("completes calls", [this] { work(); });
    worker_started_ = true;
    ++idle_workers_;
  }
  if (!watcher_started_) {
    start_detached("looks for slow completions of calls", [this] { watch_stragglers(); });
    watcher_started_ = true;
  }
}

void CompletionThreads::complete(RendezvousPtr rendezvous, CallFailurePtr error) {
  rendezvous->entry.end(error ? flight::State::failed : flight::State::done, nanoseconds(Clock::now()));
  const bool any_waited = !error && release_waiting(*rendezvous);
  const std::vector<Completion>& done = rendezvous->done;
  const auto num_completions =
      std::count_if(done.begin(), done.end(), [](const Completion& each) { return bool(each); });
  if (num_completions == 0) return;
  std::lock_guard<Mutex> lock(mutex_);
  start_locked();
  if (free_.empty()) free_.emplace_back();
  Pending& pending = free_.back();
  pending.rendezvous = std::move(rendezvous);
  pending.error = std::move(error);
  pending_.splice(pending_.end(), free_, std::prev(free_.end()));
  pending.find_next();
  // A completion that gets here is about to return, unless its rank has waited. Then this thread picks up the entry
  // next.
  const bool has_worker = (!is_completion_thread || any_waited) && wake_worker();
  // Checking every kStragglerDelay takes a tenth of a core per process. A single rank does without.
  pending.is_watched = num_completions > 1 || !has_worker;
  if (!pending.is_watched) return;
  used_ = true;
  if (watcher_asleep_) {
    pending.next_at_look = pending.next;  // the watcher's next look is a whole kStragglerDelay away
    watcher_asleep_ = false;
    watcher_wake_.notify_one();
  }
}

// Requires mutex_. Returns false if no worker is idle and none can start. A busy worker takes the work later.
bool CompletionThreads::wake_worker() {
  if (woken_workers_ < idle_workers_) {
    ++woken_workers_;
    work_available_.notify_one();
    return true;
  }
  try {
    start_detached("completes calls", [this] { work(); });
  } catch (const std::runtime_error&) {
    return false;
  }
  ++idle_workers_;
  ++woken_workers_;
  return true;
}

void CompletionThreads::run_completions(Pending& pending, std::unique_lock<Mutex>& lock) {
  ++pending.num_threads;
  while (!pending.all_started()) {
    const int rank = pending.next++;
    pending.find_next();
    holds_completions = !pending.all_started();
    lock.unlock();
    run_completion(*pending.rendezvous, rank, pending.error.get());
    lock.lock();
  }
  --pending.num_threads;
}

void CompletionThreads::work() {
  is_completion_thread = true;
  std::unique_lock<Mutex> lock(mutex_);
  for (;;) {
    // A new thread starts as an idle one, and may have been woken already.
    work_available_.wait(lock, [this] { return woken_workers_ > 0; });
    --woken_workers_;
    --idle_workers_;
    for (;;) {
      const auto found = std::find_if(pending_.begin(), pending_.end(), [](const Pending& pending) {
        return pending.num_threads == 0 || (pending.fan_out && !pending.all_started());
      });
      if (found == pending_.end()) break;
      run_completions(*found, lock);
      if (found->num_threads > 0) continue;
      used_ |= found->is_watched;
      *found = Pending();  // returns the rendezvous to its pool
      free_.splice(free_.end(), pending_, found);
    }
    ++idle_workers_;
  }
}

void CompletionThreads::watch_stragglers() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds; the default slack is half of kStragglerDelay
  std::unique_lock<Mutex> lock(mutex_);
  Clock::time_point last_use = Clock::now();
  for (;;) {
    watcher_wake_.wait_for(lock, kStragglerDelay);
    const Clock::time_point now = Clock::now();
    if (std::exchange(used_, false)) last_use = now;
    for (Pending& pending : pending_) {
      if (pending.all_started()) continue;
      if (!pending.fan_out) {
        // Each start of a completion would take a read of the clock.
        if (std::exchange(pending.next_at_look, pending.next) != pending.next) continue;
        pending.missing_threads = pending.rendezvous->num_ranks() - pending.next;
      }
      // Threads that cannot start now may start at the next check.
      while (pending.missing_threads > 0 && wake_worker()) {
        pending.fan_out = true;
        --pending.missing_threads;
      }
    }
    const bool all_started =
        std::all_of(pending_.begin(), pending_.end(), [](const Pending& pending) { return pending.all_started(); });
    if (all_started && now - last_use > kWatcherIdleTime) {
      watcher_asleep_ = true;
      watcher_wake_.wait(lock, [this] { return !watcher_asleep_; });
    }
  }
}

}  // namespace jax_ring::cpu
