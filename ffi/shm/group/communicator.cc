// communicator.cc: runs the exchanges one at a time, and waits for the peers.
#include "shm/group/communicator.h"

#include <sched.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/cores.h"
#include "base/pauses.h"
#include "base/polling.h"
#include "base/threads.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/watchdog.h"
#include "shm/peers/arrivals.h"
#include "shm/peers/departures.h"

namespace jax_ring::shm {
namespace {

// How long a thread of the runtime polls for its peers before it hands the call to the progress thread. A hand-over
// takes tens of microseconds: with a quarter of this time, four processes on two cores hand over every tenth call,
// which doubles the latency of small calls.
constexpr std::chrono::microseconds kPollTime(200);

CallFailure group_released() {
  return CallFailure::of(CallFailure::Kind::released,
                         "the group of processes was released while calls were waiting in it");
}

std::chrono::duration<double> deadline() { return std::chrono::duration<double>(cpu::Watchdog::instance().deadline()); }

}  // namespace

Communicator::Communicator(Group group, Capacities capacities, std::unique_ptr<Segments> segments, uint32_t first_round)
    : group_(std::move(group)),
      capacities_(std::move(capacities)),
      segments_(std::move(segments)),
      next_round_(first_round),
      oversubscribed_(group_.num_processes() > num_cores()) {}

Communicator::~Communicator() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  abort(group_released());
}

void Communicator::leave(const CallFailure& how) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_ || leaving_) return;
  leaving_ = how;
  if (running_calls_) {
    wake_.notify_all();
    left_.wait_for(lock, kMaxWaitToLeave, [this] { return failure_ != nullptr; });
    return;
  }
  running_calls_ = true;
  lock.unlock();
  abort({});
  lock.lock();
  running_calls_ = false;
}

void Communicator::release_idle_memory() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (running_calls_ || !ready_.empty() || channel_ == nullptr || failure_) return;
  if (std::exchange(round_at_last_release_, next_round_) != next_round_) return;
  running_calls_ = true;
  lock.unlock();
  channel_->release_idle();
  lock.lock();
  running_calls_ = false;
  if (!ready_.empty() || leaving_) hand_over_to_progress_thread(lock);
}

cpu::RendezvousPtr Communicator::submit(Call&& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_) {
    cpu::CompletionThreads::instance().complete(std::move(call.rendezvous), failure_);
    return nullptr;
  }
  if (free_.empty()) free_.push_back(std::make_unique<Exchange>(group_));
  ExchangePtr exchange = std::move(free_.back());
  free_.pop_back();
  exchange->begin(std::move(call));
  if (running_calls_ || channel_ == nullptr) {
    ready_.push_back(std::move(exchange));
    if (!running_calls_) hand_over_to_progress_thread(lock);
    wake_.notify_one();  // it may be waiting for this call
    return nullptr;
  }
  running_calls_ = true;
  start(std::move(exchange));
  lock.unlock();
  if (abort_if_peer_aborted() || !poll_current()) {
    lock.lock();
    hand_over_to_progress_thread(lock);
    return nullptr;
  }
  cpu::RendezvousPtr rendezvous = finish(lock);
  running_calls_ = false;
  if (!ready_.empty() || (leaving_ && !failure_)) hand_over_to_progress_thread(lock);
  return rendezvous;
}

// Called by the thread that runs calls, or while there is none. Fails all calls if the thread cannot start. lock: of
// mutex_.
void Communicator::hand_over_to_progress_thread(std::unique_lock<std::mutex>& lock) {
  running_calls_ = true;
  try {
    if (!thread_.joinable()) {
      thread_ = start_thread("waits for the other processes of a group", [this] { run_progress_thread(); });
    }
  } catch (const std::runtime_error& error) {
    std::string why = error.what();
    if (current_ != nullptr || !ready_.empty()) {
      why = *(current_ != nullptr ? current_ : ready_.front())->call().text + ": " + why;
    }
    lock.unlock();
    abort(CallFailure::of(CallFailure::Kind::resources, why, ErrorCode::resource_exhausted));
    lock.lock();
    running_calls_ = false;
    return;
  }
  on_progress_thread_ = true;
  wake_.notify_one();
}

void Communicator::run_progress_thread() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || on_progress_thread_ || failure_; });
    if (stop_ || !on_progress_thread_) return;
    const bool is_new = channel_ == nullptr && !failure_;
    lock.unlock();
    if (is_new) {
      connecting_since_ = cpu::Clock::now();
      connect();
    }
    progress_calls();
    lock.lock();
  }
}

void Communicator::connect() {
  try {
    const auto began = cpu::Clock::now();
    Memory memory = segments_->connect(Channel::bytes(group_.num_processes(), capacities_),
                                       [this, began] { return should_stop_connecting(began); });
    auto channel =
        std::make_unique<Channel>(memory.get(), group_.num_processes(), group_.self(), capacities_, segments_.get());
    channel->join();
    std::lock_guard<std::mutex> lock(mutex_);  // submit() reads channel_
    memory_ = std::move(memory);
    channel_ = std::move(channel);
  } catch (const std::exception& error) {
    std::string call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ready_.empty()) call = *ready_.front()->call().text + ": ";
    }
    const auto* const known = dynamic_cast<const CallError*>(&error);
    CallFailure why = known != nullptr ? known->failure : CallFailure::of(CallFailure::Kind::other, error.what());
    why.text = call + why.text + " (The group's first process, which creates its memory, is " + name_of(0) + ".)";
    abort(std::move(why));
    segments_->clean_up([this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return stop_ || leaving_;
    });
  }
}

// Whether waiting for the others has become useless. Throws CallError if one of them has left.
bool Communicator::should_stop_connecting(cpu::Clock::time_point began) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_ || leaving_) return true;
  }
  if (cpu::Clock::now() - began < kPatience) return false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self()) continue;
    Departures::instance().ask(group_.process_id(process));
    if (const auto how = Departures::instance().of(group_.process_id(process)))
      throw CallError(failure_by(process, *how));
  }
  return false;
}

// Runs calls until none is left, or until the group is released.
void Communicator::progress_calls() {
  for (;;) {
    if (current_ == nullptr && !select_next()) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stop_ || (ready_.empty() && (!leaving_ || failure_))) {
        running_calls_ = on_progress_thread_ = false;
        return;
      }
      const bool leaves = leaving_.has_value(), has_come = next_call() != ready_.end();  // since select_next() looked
      lock.unlock();
      if (leaves) {
        abort({});
      } else if (!has_come) {
        wait_for_leader_call();
      }
      continue;
    }
    if (abort_if_peer_aborted()) continue;
    if (poll_current()) {
      complete_current();
    } else if (is_preempted()) {
      requeue_current();
    } else {
      wait_for_peer();
    }
  }
}

// The call to run: the leader's, or the one that has been ready longest. The end if there is none. Requires mutex_.
auto Communicator::next_call() -> std::deque<ExchangePtr>::iterator {
  if (!leader_call_) return ready_.begin();
  return std::find_if(ready_.begin(), ready_.end(),
                      [&](const ExchangePtr& exchange) { return exchange->call().id == *leader_call_; });
}

bool Communicator::select_next() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_ || (leaving_ && on_progress_thread_)) return false;
  const auto found = next_call();
  if (found == ready_.end()) return false;
  ExchangePtr exchange = std::move(*found);
  ready_.erase(found);
  start(std::move(exchange));
  return true;
}

// Makes it the current call. Requires mutex_.
void Communicator::start(ExchangePtr exchange) {
  current_ = std::move(exchange);
  leader_call_.reset();
  waiting_since_ = std::exchange(connecting_since_, std::nullopt);  // else from its first wait on
  phases_at_wait_start_ = current_->phases_done();
}

// Whether another process aborted the group before this one started the call. The call then fails here as well, even if
// all its inputs are there.
bool Communicator::abort_if_peer_aborted() {
  if (current_->has_started()) return false;
  // Once all have joined, an aborting process tells the others. Their own lines are not here right after they signal.
  if (has_opened_peers_ && !channel_->has_notice_of_abort()) return false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self() || !channel_->has_aborted(process)) continue;
    const std::vector<int> culprits = gone_processes();
    CallFailure why = failure_by(culprits.empty() ? std::vector<int>{process} : culprits);
    why.text.insert(0, *current_->call().text + ": this group of processes can no longer be used.");
    abort(std::move(why));
    return true;
  }
  return false;
}

// Advances the current call, polling for up to kPollTime. Returns whether it is done.
bool Communicator::poll_current() {
  const auto is_done = [this] { return current_->advance(*channel_, next_round_) == Exchange::State::done; };
  if (is_done()) return true;
  if (!oversubscribed_) {
    for (int i = 0; i < kSpins; ++i) {
      cpu_relax();
      if (is_done()) return true;
    }
  }
  const auto now = cpu::Clock::now(), end = now + kPollTime;
  if (!waiting_since_) waiting_since_ = now;
  do {
    for (int i = 0; i < kYieldsPerClockRead; ++i) {
      if (is_preempted()) return false;
      sched_yield();
      if (is_done()) return true;
    }
  } while (cpu::Clock::now() < end);
  return false;
}

bool Communicator::is_preempted() const {
  if (group_.self() == 0 || !current_->is_waiting_for_leader()) return false;
  const auto other = channel_->staged_call(0, next_round_);
  return other && *other != current_->call().id;
}

// Puts the current call back, in favor of the leader's.
void Communicator::requeue_current() {
  std::lock_guard<std::mutex> lock(mutex_);
  leader_call_ = channel_->staged_call(0, next_round_);
  current_->restart();
  ready_.push_front(std::move(current_));
  waiting_since_ = cpu::Clock::now();
}

// Sleeps until the awaited peer signals.
void Communicator::wait_for_peer() {
  const int peer = current_->awaited_peer();
  const uint32_t seen = channel_->doorbell(peer);
  const uint64_t steps = current_->num_steps();
  if (current_->advance(*channel_, next_round_) == Exchange::State::done) return complete_current();
  // The clock goes on while one peer after the other arrives. Otherwise a call could wait one deadline for each of
  // them.
  if (current_->phases_done() != phases_at_wait_start_) {
    phases_at_wait_start_ = current_->phases_done();
    waiting_since_ = cpu::Clock::now();
    return;
  }
  if (current_->num_steps() != steps || is_preempted()) return;
  const auto waited = Pauses::instance().run_since(*waiting_since_);
  if (waited > kPollInterval) post_current_call();
  if (waited > deadline() || is_hopeless(waited)) {
    // The process may have signaled before it exited.
    if (current_->advance(*channel_, next_round_) == Exchange::State::done) return complete_current();
    if (current_->num_steps() != steps) return;
    return abort(failure_of_missing_processes(*current_));
  }
  channel_->wait_doorbell(peer, seen, kPollInterval);
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_ || leaving_) {
    lock.unlock();
    abort(group_released());
  }
}

// Sleeps until the leader's call may be ready, or aborts the group once the deadline has passed.
void Communicator::wait_for_leader_call() {
  const auto waited = Pauses::instance().run_since(*waiting_since_);
  if (waited > kPollInterval) post_current_call();
  const bool hopeless = is_hopeless(waited);
  if (waited > deadline() || hopeless) {
    std::ostringstream text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ready_.empty()) return;
      text << *ready_.front()->call().text;
    }
    const std::vector<int> culprits = gone_processes();
    CallFailure why = failure_by(culprits.empty() ? std::vector<int>{0} : culprits);
    text << ": process " << group_.process_id(0) << " makes another call, which process "
         << group_.process_id(group_.self()) << " did not make within " << seconds_waited() << " s." << why.text;
    if (culprits.empty()) {
      text << " All processes must make the same calls in the same order, with the same shapes and dtypes: look for a "
              "branch or a loop whose condition differs between them.";
    }
    why.text = text.str();
    return abort(std::move(why));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, kPollInterval, [this] { return stop_ || leaving_ || next_call() != ready_.end(); });
}

// Ends the current call, and takes the lock of mutex_.
cpu::RendezvousPtr Communicator::finish(std::unique_lock<std::mutex>& lock) {
  next_round_ += current_->num_rounds();
  cpu::RendezvousPtr rendezvous = current_->release();
  if (current_->num_rounds() > 0) end_entry(rendezvous->entry, group_, current_->arrivals());
  if (!std::exchange(has_opened_peers_, true)) {
    open_peers(group_, *channel_);
    oversubscribed_ = group_.num_processes() > channel_->num_cores();  // each may be bound to its own cores
  }
  if (std::exchange(has_posted_status_, false)) channel_->post_status("");
  lock.lock();
  free_.push_back(std::move(current_));
  return rendezvous;
}

void Communicator::complete_current() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  cpu::RendezvousPtr rendezvous = finish(lock);
  lock.unlock();
  cpu::CompletionThreads::instance().complete(std::move(rendezvous));
}

void Communicator::post_current_call() {
  if (std::exchange(has_posted_status_, true)) return;
  std::string text;
  if (current_ != nullptr) {
    text = *current_->call().text;
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ready_.empty()) text = *ready_.front()->call().text;
  }
  channel_->post_status(text);
}

}  // namespace jax_ring::shm
