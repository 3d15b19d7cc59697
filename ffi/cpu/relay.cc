// relay.cc: the threads that tell, and the one that sees when a telling takes long.
#include "cpu/relay.h"

#include <algorithm>
#include <thread>

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

void Relay::tell(std::unique_ptr<Meeting> meeting, std::optional<std::string> error) {
  auto telling = std::make_shared<Telling>();
  telling->meeting = std::move(meeting);
  telling->error = std::move(error);
  std::lock_guard<std::mutex> lock(mutex_);
  last_use_ = telling->called = Clock::now();
  tellings_.push_back(std::move(telling));
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

bool Relay::tell_next(Telling& telling, std::unique_lock<std::mutex>& lock) {
  auto& participants = telling.meeting->participants;
  while (telling.next < participants.size() && !participants[telling.next]) ++telling.next;
  if (telling.next >= participants.size()) return false;
  Completion done = std::move(participants[telling.next++]->done);
  telling.called = Clock::now();
  lock.unlock();
  if (done) done(telling.error ? &*telling.error : nullptr);
  lock.lock();
  return true;
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
      const auto found = std::find_if(tellings_.begin(), tellings_.end(),
                                      [](const auto& telling) { return !telling->taken || telling->shared; });
      if (found == tellings_.end()) break;
      const std::shared_ptr<Telling> telling = *found;
      telling->taken = true;
      while (tell_next(*telling, lock)) {
      }
      // Someone else may have ended it first.
      const auto ended = std::find(tellings_.begin(), tellings_.end(), telling);
      if (ended != tellings_.end()) tellings_.erase(ended);
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
    for (const auto& telling : tellings_) {
      if (telling->shared || now - telling->called < kPatience) continue;
      telling->shared = true;
      const auto& participants = telling->meeting->participants;
      for (size_t rank = telling->next; rank < participants.size(); ++rank) call_worker();
    }
    if (tellings_.empty() && now - last_use_ > kStaysAwake) {
      watcher_asleep_ = true;
      watch_.wait(lock, [this] { return !watcher_asleep_; });
    }
  }
}

}  // namespace jax_ring::cpu
