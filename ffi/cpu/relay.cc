// relay.cc: the threads that tell, and the one that sees when a telling takes long.
#include "cpu/relay.h"

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sys/prctl.h>
#endif

namespace jax_ring::cpu {
namespace {

// The watcher looks around every kPatience for this long after the last use, and then sleeps until it is woken: in a
// loop of collectives nobody pays for waking it.
constexpr std::chrono::milliseconds kStaysAwake(20);

thread_local bool is_worker = false;

}  // namespace

Relay& Relay::instance() {
  // Never destroyed: its threads may outlive main.
  static Relay* const relay = new Relay;
  return *relay;
}

void Relay::tell(MeetingPtr meeting, std::optional<std::string> error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spares_.empty()) spares_.emplace_back();
  Telling& telling = spares_.back();
  telling.meeting = std::move(meeting);
  telling.error = std::move(error);
  tellings_.splice(tellings_.end(), spares_, std::prev(spares_.end()));
  last_use_ = telling.called = Clock::now();
  // A worker that comes here from within a telling is about to return and will find this one.
  if (!is_worker) call_worker();
  if (!watcher_started_) {
    watcher_started_ = true;
    std::thread([this] { watch(); }).detach();
  } else if (watcher_asleep_) {
    watcher_asleep_ = false;
    watch_.notify_one();
  }
}

void Relay::call_worker() {
  if (called_workers_ < idle_workers_) {
    ++called_workers_;
    work_.notify_one();
  } else {
    ++idle_workers_;
    ++called_workers_;
    std::thread([this] { work(); }).detach();
  }
}

void Relay::tell_ranks(Telling& telling, std::unique_lock<std::mutex>& lock) {
  ++telling.num_tellers;
  while (!telling.all_called()) {
    Completion done = std::move(telling.meeting->done[telling.next++]);
    if (!done) continue;
    telling.called = Clock::now();
    lock.unlock();
    done(telling.error ? &*telling.error : nullptr);
    lock.lock();
  }
  --telling.num_tellers;
}

void Relay::work() {
  is_worker = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    // A new thread starts here as an idle one that has been called.
    work_.wait(lock, [this] { return called_workers_ > 0; });
    --called_workers_;
    --idle_workers_;
    for (;;) {
      const auto found = std::find_if(tellings_.begin(), tellings_.end(), [](const Telling& telling) {
        return telling.num_tellers == 0 || (telling.shared && !telling.all_called());
      });
      if (found == tellings_.end()) break;
      tell_ranks(*found, lock);
      if (found->num_tellers > 0) continue;
      *found = Telling();  // which ends the meeting
      spares_.splice(spares_.end(), tellings_, found);
    }
    ++idle_workers_;
    last_use_ = Clock::now();
  }
}

void Relay::watch() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds; the default alone would be half of kPatience
#endif
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    watch_.wait_for(lock, kPatience);
    const Clock::time_point now = Clock::now();
    for (Telling& telling : tellings_) {
      if (telling.shared || now - telling.called < kPatience) continue;
      telling.shared = true;
      for (int rank = telling.next; rank < telling.meeting->num_ranks(); ++rank) call_worker();
    }
    const bool nothing_to_see =
        std::all_of(tellings_.begin(), tellings_.end(), [](const Telling& telling) { return telling.all_called(); });
    if (nothing_to_see && now - last_use_ > kStaysAwake) {
      watcher_asleep_ = true;
      watch_.wait(lock, [this] { return !watcher_asleep_; });
    }
  }
}

}  // namespace jax_ring::cpu
