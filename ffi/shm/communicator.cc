// communicator.cc: runs the exchanges one at a time, and waits for the peers.
#include "shm/communicator.h"

#include <sched.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "cpu/completion_threads.h"
#include "cpu/watchdog.h"
#include "shm/arrivals.h"

namespace jax_ring::shm {
namespace {

// How long a thread of the runtime polls for its peers before it hands the call to the progress thread. A hand-over
// takes tens of microseconds: with a quarter of this time, four processes on two cores hand over every tenth call,
// which doubles the latency of small calls.
constexpr std::chrono::microseconds kPollTime(200);
// Polls back to back, followed by one poll per sched_yield().
constexpr int kSpins = 200;
constexpr int kYieldsPerClockRead = 8;
// Poll interval of a sleeping thread, which nothing wakes when a process exits.
constexpr std::chrono::milliseconds kPollInterval(20);

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::chrono::duration<double> deadline() { return std::chrono::duration<double>(cpu::Watchdog::instance().deadline()); }

}  // namespace

Communicator::Communicator(Group group, const Capacity& capacity, Connect connect, uint32_t first_round)
    : group_(std::move(group)),
      capacity_(capacity),
      connect_(std::move(connect)),
      oversubscribed_(group_.num_processes() > static_cast<int>(std::thread::hardware_concurrency())),
      next_round_(first_round) {}

Communicator::~Communicator() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  abort("the group of processes was released while calls were waiting in it");
}

cpu::RendezvousPtr Communicator::submit(Call&& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_) {
    cpu::CompletionThreads::instance().complete(std::move(call.rendezvous), failure_);
    return nullptr;
  }
  if (free_.empty()) free_.push_back(std::make_unique<Exchange>(group_, capacity_));
  ExchangePtr exchange = std::move(free_.back());
  free_.pop_back();
  exchange->begin(std::move(call));
  ready_.push_back(std::move(exchange));
  if (running_calls_ || channel_ == nullptr) {
    if (!running_calls_) hand_over_to_progress_thread();
    wake_.notify_one();  // it may be waiting for this call
    return nullptr;
  }
  running_calls_ = true;
  lock.unlock();
  select_next();
  if (abort_if_peer_aborted() || !poll_current()) {
    lock.lock();
    hand_over_to_progress_thread();
    return nullptr;
  }
  cpu::RendezvousPtr rendezvous = finish();
  lock.lock();
  running_calls_ = false;
  if (!ready_.empty()) hand_over_to_progress_thread();
  return rendezvous;
}

// Requires mutex_. Called by the thread that runs calls, or while there is none.
void Communicator::hand_over_to_progress_thread() {
  running_calls_ = on_progress_thread_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { run_progress_thread(); });
  wake_.notify_one();
}

void Communicator::run_progress_thread() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || on_progress_thread_ || failure_; });
    if (stop_ || !on_progress_thread_) return;
    const bool is_new = channel_ == nullptr && !failure_;
    lock.unlock();
    if (is_new) connect();
    progress_calls();
    lock.lock();
  }
}

void Communicator::connect() {
  try {
    Memory memory = connect_([this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return stop_;
    });
    auto channel = std::make_unique<Channel>(memory.get(), group_.num_processes(), group_.self(), capacity_);
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
    abort(call + error.what() + " (The group's first process, which creates its memory, is " + name_of(0) + ".)");
  }
}

// Runs calls until none is left, or until the group is released.
void Communicator::progress_calls() {
  for (;;) {
    if (current_ == nullptr && !select_next()) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stop_ || ready_.empty()) {
        running_calls_ = on_progress_thread_ = false;
        return;
      }
      lock.unlock();
      if (!wait_for_leader_call()) continue;
    }
    if (current_ == nullptr || abort_if_peer_aborted()) continue;
    if (poll_current()) {
      cpu::CompletionThreads::instance().complete(finish());
    } else if (is_preempted()) {
      requeue_current();
    } else {
      wait_for_peer();
    }
  }
}

// Selects the call to run: the leader's, or else the one that has been ready longest.
bool Communicator::select_next() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return false;
  auto found = ready_.begin();
  if (leader_call_) {
    found = std::find_if(ready_.begin(), ready_.end(),
                         [&](const ExchangePtr& exchange) { return exchange->call().id == *leader_call_; });
  }
  if (found == ready_.end()) return false;
  current_ = std::move(*found);
  ready_.erase(found);
  leader_call_.reset();
  waiting_since_ = cpu::Clock::now();
  steps_at_wait_start_ = current_->num_steps();
  return true;
}

// Whether another process has aborted the group before this one started the call. The call then fails here as well,
// even if all its inputs are there.
bool Communicator::abort_if_peer_aborted() {
  if (current_->has_started()) return false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self() || !channel_->has_aborted(process)) continue;
    abort(*current_->call().text + ": this group of processes can no longer be used. " + describe_peer(process));
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
  const auto end = cpu::Clock::now() + kPollTime;
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

// Puts the current call back, in favor of the one that the leader has started.
void Communicator::requeue_current() {
  std::lock_guard<std::mutex> lock(mutex_);
  leader_call_ = channel_->staged_call(0, next_round_);
  current_->restart();
  ready_.push_front(std::move(current_));
  waiting_since_ = cpu::Clock::now();
}

// Sleeps until the peer that the call waits for signals.
void Communicator::wait_for_peer() {
  const int peer = current_->awaited_peer();
  const uint32_t seen = channel_->doorbell(peer);
  if (current_->advance(*channel_, next_round_) == Exchange::State::done) {
    return cpu::CompletionThreads::instance().complete(finish());
  }
  if (current_->num_steps() != steps_at_wait_start_) {
    steps_at_wait_start_ = current_->num_steps();
    waiting_since_ = cpu::Clock::now();
    return;
  }
  if (is_preempted()) return;
  const auto waited = cpu::Clock::now() - waiting_since_;
  if (waited > kPollInterval) post_current_call();
  const bool exited = channel_->has_exited(peer), aborted = channel_->has_aborted(peer);
  if (waited > deadline() || exited || aborted) {
    // It may have signaled before it exited.
    if (current_->advance(*channel_, next_round_) == Exchange::State::done) {
      return cpu::CompletionThreads::instance().complete(finish());
    }
    if (current_->num_steps() != steps_at_wait_start_) return;
    return abort(describe_missing_processes(*current_));
  }
  channel_->wait_doorbell(peer, seen, kPollInterval);
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_) {
    lock.unlock();
    abort("the group of processes was released while calls were waiting in it");
  }
}

// Sleeps until the leader's call may be ready, or aborts the group once the deadline has passed. Returns false: the
// caller selects again.
bool Communicator::wait_for_leader_call() {
  const auto waited = cpu::Clock::now() - waiting_since_;
  if (waited > kPollInterval) post_current_call();
  if (waited > deadline() || channel_->has_exited(0) || channel_->has_aborted(0)) {
    std::ostringstream text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ready_.empty()) return false;
      text << *ready_.front()->call().text;
    }
    text << ": process " << group_.process_id(0) << " makes another call, which process "
         << group_.process_id(group_.self()) << " did not make within " << deadline().count() << " s. "
         << describe_peer(0) << " All processes must make the same calls in the same order, with the same shapes and "
         << "dtypes: look for a branch or a loop whose condition differs between them.";
    abort(text.str());
    return false;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, kPollInterval);
  return false;
}

cpu::RendezvousPtr Communicator::finish() {
  next_round_ += current_->num_rounds();
  cpu::RendezvousPtr rendezvous = current_->release();
  if (current_->num_rounds() > 0) end_entry(rendezvous->entry, group_, *channel_, next_round_ - 1);
  if (!std::exchange(has_opened_peers_, true)) open_peers(group_, *channel_);
  if (std::exchange(has_posted_status_, false)) channel_->post_status("");
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(current_));
  return rendezvous;
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

// Fails all calls, now and in future: after a timeout this process no longer knows how far its peers are.
void Communicator::abort(const std::string& why) {
  std::vector<ExchangePtr> failed;
  const LastCalls last_calls = last_calls_of(group_);  // before they count as failed
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = why + last_calls.sentence;
    if (current_ != nullptr) failed.push_back(std::move(current_));
    for (ExchangePtr& exchange : ready_) failed.push_back(std::move(exchange));
    ready_.clear();
    leader_call_.reset();
  }
  if (channel_ != nullptr) {
    if (!has_posted_status_) channel_->post_status(why);
    channel_->abort();
    std::lock_guard<std::mutex> lock(mutex_);
    channel_.reset();
    memory_.reset();
  }
  // Before the calls fail, which may end the process at once.
  if (!failed.empty()) flight::Recorder::instance().print_once(last_calls.table);
  for (ExchangePtr& exchange : failed) {
    cpu::RendezvousPtr rendezvous = exchange->release();
    cpu::Watchdog::instance().record_failure(rendezvous->run_id, *failure_);
    cpu::CompletionThreads::instance().complete(std::move(rendezvous), *failure_);
  }
}

std::string Communicator::name_of(int process) const {
  std::ostringstream text;
  const std::vector<int>& ranks = group_.ranks_of(process);
  text << "process " << group_.process_id(process) << " (rank" << (ranks.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
  text << ")";
  return text.str();
}

std::string Communicator::describe_peer(int process) const {
  std::ostringstream text;
  text << "P" << name_of(process).substr(1) << " ";
  const std::string status = channel_->status_of(process);
  if (!channel_->has_joined(process)) {
    text << "has not made a call in this group yet.";
  } else if (channel_->has_exited(process)) {
    text << "has ended.";
  } else if (channel_->has_aborted(process)) {
    text << "has aborted the group. Last status: " << (status.empty() ? "none" : status) << ".";
  } else if (!status.empty()) {
    text << "waits in another call: " << status << ".";
  } else {
    text << "is stopped, or busy with something else.";
  }
  return text.str();
}

std::string Communicator::describe_missing_processes(const Exchange& exchange) const {
  std::ostringstream text, peers;
  int num_missing = 0;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (!exchange.is_missing(process, *channel_, next_round_)) continue;
    ++num_missing;
    peers << " " << describe_peer(process);
  }
  text << *exchange.call().text << ": process " << group_.process_id(group_.self()) << " waited for " << num_missing
       << " of the group's " << group_.num_processes() << " processes, for up to " << deadline().count() << " s."
       << peers.str()
       << " Every process must make the same calls: look for an error or an early exit there, and for a branch or a "
          "loop whose condition differs between processes. If the others are only slow, set JAX_RING_TIMEOUT_S to more "
          "seconds.";
  return text.str();
}

}  // namespace jax_ring::shm
