// communicator.cc: drives the exchanges, by turns, and waits.
#include "shm/communicator.h"

#include <sched.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "common/call_sites.h"
#include "cpu/relay.h"
#include "cpu/watchdog.h"

namespace jax_ring::shm {
namespace {

// How long a thread of the runtime looks for the others before it leaves. To hand a call over takes tens of
// microseconds: with a quarter of this time, four processes on two cores do so in every tenth call, which doubles the
// time of small ones.
constexpr std::chrono::microseconds kBrief(200);
// Looks in a row, and then one for each turn that other threads get.
constexpr int kSpins = 200;
constexpr int kSpinsPerLookAtClock = 8;
// A sleeper looks around this often, because nobody wakes it when a process ends.
constexpr std::chrono::milliseconds kNap(20);

void pause_briefly() {
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
      crowded_(group_.num_processes() > static_cast<int>(std::thread::hardware_concurrency())),
      next_round_(first_round) {}

Communicator::~Communicator() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  fail("the group of processes was released while calls were waiting in it");
}

cpu::MeetingPtr Communicator::submit(Call&& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_) {
    cpu::Relay::instance().tell(std::move(call.meeting), failure_);
    return nullptr;
  }
  if (spares_.empty()) spares_.push_back(std::make_unique<Exchange>(group_, capacity_));
  ExchangePtr exchange = std::move(spares_.back());
  spares_.pop_back();
  exchange->begin(std::move(call));
  ready_.push_back(std::move(exchange));
  if (driving_ || channel_ == nullptr) {
    if (!driving_) hand_over();
    wake_.notify_one();  // it may wait for this call
    return nullptr;
  }
  driving_ = true;
  lock.unlock();
  take_next();
  if (has_failed() || !advance_briefly()) {
    lock.lock();
    hand_over();
    return nullptr;
  }
  cpu::MeetingPtr meeting = finish();
  lock.lock();
  driving_ = false;
  if (!ready_.empty()) hand_over();
  return meeting;
}

// With the lock held, by whoever drives, or if nobody does.
void Communicator::hand_over() {
  driving_ = handed_over_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  wake_.notify_one();
}

void Communicator::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || handed_over_ || failure_; });
    if (stop_ || !handed_over_) return;
    const bool is_new = channel_ == nullptr && !failure_;
    lock.unlock();
    if (is_new) connect();
    drive();
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
    channel->enter();
    std::lock_guard<std::mutex> lock(mutex_);  // submit() looks at it
    memory_ = std::move(memory);
    channel_ = std::move(channel);
  } catch (const std::exception& error) {
    std::string call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ready_.empty()) call = describe_call(ready_.front()->call()) + ": ";
    }
    fail(call + error.what() + " (The group's first process, which makes its memory, is " + name_of(0) + ".)");
  }
}

// Carries calls out until there is none left, or until the group is released.
void Communicator::drive() {
  for (;;) {
    if (current_ == nullptr && !take_next()) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stop_ || ready_.empty()) {
        driving_ = handed_over_ = false;
        return;
      }
      lock.unlock();
      if (!await_wanted()) continue;
    }
    if (current_ == nullptr || has_failed()) continue;
    if (advance_briefly()) {
      cpu::Relay::instance().tell(finish());
    } else if (is_displaced()) {
      give_way();
    } else {
      wait_for_peer();
    }
  }
}

// The call to go on with: the one that the first process wants, or the one that has been ready for longest.
bool Communicator::take_next() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return false;
  auto found = ready_.begin();
  if (wanted_) {
    found = std::find_if(ready_.begin(), ready_.end(),
                         [&](const ExchangePtr& exchange) { return exchange->call().id == *wanted_; });
  }
  if (found == ready_.end()) return false;
  current_ = std::move(*found);
  ready_.erase(found);
  wanted_.reset();
  waiting_since_ = cpu::Clock::now();
  progress_ = current_->progress();
  return true;
}

// Whether the group has been given up by another process, before this one's part in the call has begun: then the call
// fails here as well, even if it finds all that it needs.
bool Communicator::has_failed() {
  if (current_->has_begun()) return false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self() || !channel_->gave_up(process)) continue;
    fail(describe_call(current_->call()) + ": the group of processes is of no use any more. " + describe_peer(process));
    return true;
  }
  return false;
}

// Whether the call is done. If it has to wait for longer than kBrief it is not.
bool Communicator::advance_briefly() {
  const auto is_done = [this] { return current_->advance(*channel_, next_round_) == Exchange::State::done; };
  if (is_done()) return true;
  if (!crowded_) {
    for (int i = 0; i < kSpins; ++i) {
      pause_briefly();
      if (is_done()) return true;
    }
  }
  const auto end = cpu::Clock::now() + kBrief;
  do {
    for (int i = 0; i < kSpinsPerLookAtClock; ++i) {
      if (is_displaced()) return false;
      sched_yield();
      if (is_done()) return true;
    }
  } while (cpu::Clock::now() < end);
  return false;
}

bool Communicator::is_displaced() const {
  if (group_.self() == 0 || !current_->waits_to_begin()) return false;
  const auto other = channel_->call_of(0, next_round_);
  return other && *other != current_->call().id;
}

// Puts the current call back, for the one that the first process has begun.
void Communicator::give_way() {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_ = channel_->call_of(0, next_round_);
  current_->start_again();
  ready_.push_front(std::move(current_));
  waiting_since_ = cpu::Clock::now();
}

// Sleeps until the process that the call waits for does something.
void Communicator::wait_for_peer() {
  const int peer = current_->waits_for();
  const uint32_t seen = channel_->bell(peer);
  if (current_->advance(*channel_, next_round_) == Exchange::State::done) {
    return cpu::Relay::instance().tell(finish());
  }
  if (current_->progress() != progress_) {
    progress_ = current_->progress();
    waiting_since_ = cpu::Clock::now();
    return;
  }
  if (is_displaced()) return;
  const auto waited = cpu::Clock::now() - waiting_since_;
  if (waited > kNap) say_where();
  const bool ended = channel_->has_ended(peer), gave_up = channel_->gave_up(peer);
  if (waited > deadline() || ended || gave_up) {
    // It may have come before it ended.
    if (current_->advance(*channel_, next_round_) == Exchange::State::done) {
      return cpu::Relay::instance().tell(finish());
    }
    if (current_->progress() != progress_) return;
    return fail(describe_absence(*current_));
  }
  channel_->sleep(peer, seen, kNap);
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_) {
    lock.unlock();
    fail("the group of processes was released while calls were waiting in it");
  }
}

// Sleeps until the call that the first process wants may be ready. False if it is time to give up.
bool Communicator::await_wanted() {
  const auto waited = cpu::Clock::now() - waiting_since_;
  if (waited > kNap) say_where();
  if (waited > deadline() || channel_->has_ended(0) || channel_->gave_up(0)) {
    std::ostringstream text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ready_.empty()) return false;
      text << describe_call(ready_.front()->call());
    }
    text << ": process " << group_.name_of(0) << " makes another call, for which process "
         << group_.name_of(group_.self()) << " did not come within " << deadline().count() << " s. " << describe_peer(0)
         << " All processes must make the same calls in the same order, with the same shapes and "
         << "dtypes: look for a branch or a loop whose condition differs between them.";
    fail(text.str());
    return false;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, kNap);
  return false;
}

cpu::MeetingPtr Communicator::finish() {
  next_round_ += current_->num_rounds();
  cpu::MeetingPtr meeting = current_->end();
  if (std::exchange(has_spoken_, false)) channel_->say("");
  std::lock_guard<std::mutex> lock(mutex_);
  spares_.push_back(std::move(current_));
  return meeting;
}

void Communicator::say_where() {
  if (std::exchange(has_spoken_, true)) return;
  std::string text;
  if (current_ != nullptr) {
    text = describe_call(current_->call());
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ready_.empty()) text = describe_call(ready_.front()->call());
  }
  channel_->say(text);
}

// Ends all calls, now and from now on: who has waited in vain no longer knows how far the others are.
void Communicator::fail(const std::string& why) {
  std::vector<ExchangePtr> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = why;
    if (current_ != nullptr) failed.push_back(std::move(current_));
    for (ExchangePtr& exchange : ready_) failed.push_back(std::move(exchange));
    ready_.clear();
    wanted_.reset();
  }
  if (channel_ != nullptr) {
    if (!has_spoken_) channel_->say(why);
    channel_->give_up();
    std::lock_guard<std::mutex> lock(mutex_);
    channel_.reset();
    memory_.reset();
  }
  for (ExchangePtr& exchange : failed) {
    cpu::MeetingPtr meeting = exchange->end();
    cpu::Watchdog::instance().note_failure(meeting->run_id, *failure_);
    cpu::Relay::instance().tell(std::move(meeting), *failure_);
  }
}

std::string Communicator::describe_call(const Call& call) const { return *call.text + called_at(*call.text); }

std::string Communicator::name_of(int process) const {
  std::ostringstream text;
  const std::vector<int>& ranks = group_.ranks_of(process);
  text << "process " << group_.name_of(process) << " (rank" << (ranks.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
  text << ")";
  return text.str();
}

std::string Communicator::describe_peer(int process) const {
  std::ostringstream text;
  text << "P" << name_of(process).substr(1) << " ";
  const std::string said = channel_->said(process);
  if (!channel_->has_entered(process)) {
    text << "has not made a call in this group yet.";
  } else if (channel_->has_ended(process)) {
    text << "has ended.";
  } else if (channel_->gave_up(process)) {
    text << "has given up. It said: " << (said.empty() ? "nothing" : said) << ".";
  } else if (!said.empty()) {
    text << "waits in another call: " << said << ".";
  } else {
    text << "is stopped, or busy with something else.";
  }
  return text.str();
}

std::string Communicator::describe_absence(const Exchange& exchange) const {
  std::ostringstream text, peers;
  int num_missing = 0;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (!exchange.lacks(process, *channel_, next_round_)) continue;
    ++num_missing;
    peers << " " << describe_peer(process);
  }
  text << describe_call(exchange.call()) << ": process " << group_.name_of(group_.self()) << " waited for "
       << num_missing << " of the group's " << group_.num_processes() << " processes, for up to " << deadline().count()
       << " s." << peers.str()
       << " Every process must make the same calls: look for an error or an early exit there, and for a branch or a "
          "loop "
          "whose condition differs between processes. If the others are only slow, set JAX_RING_TIMEOUT_S to more "
          "seconds.";
  return text.str();
}

}  // namespace jax_ring::shm
