// communicator_failure.cc: if the group's calls cannot complete: the process to blame, and the failure.
#include <algorithm>
#include <iomanip>
#include <sstream>
#include <tuple>
#include <utility>

#include "base/pauses.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/watchdog.h"
#include "shm/group/communicator.h"
#include "shm/peers/arrivals.h"
#include "shm/peers/departures.h"

namespace jax_ring::shm {
namespace {

// How long to wait for news of a process that shares no memory with this one.
constexpr std::chrono::milliseconds kTimeForAnswer(500);

// The predicate for a process that announces this.
std::string predicate_of(const CallFailure& how) {
  return how.process == CallFailure::kNone ? how.cause : "failed because " + how.cause;
}

// A sentence without its period, which goes on. Another process may have posted any text.
std::string clause_of(std::string sentence) {
  if (!sentence.empty() && sentence.back() == '.') sentence.pop_back();
  return sentence;
}

}  // namespace

// Whether the group cannot complete the current call: data that a process staged before it left is there by now, and it
// cannot have finished the call unless all others had staged theirs.
bool Communicator::is_hopeless(cpu::Clock::duration waited) {
  bool has_aborted = false, has_unknown = false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self()) continue;
    if (channel_->has_left(process)) return true;
    const bool aborted = channel_->has_aborted(process);
    has_aborted = has_aborted || aborted;
    if (aborted && !channel_->has_joined(process)) return true;  // it could not map the memory
    if (channel_->has_joined(process)) {
      // Reading /proc takes several microseconds.
      if (waited > kPollInterval && channel_->has_exited(process)) return true;
    } else if (waited > kPatience || has_aborted) {
      Departures::instance().ask(group_.process_id(process));
      if (Departures::instance().of(group_.process_id(process))) return true;
      has_unknown = true;
    }
  }
  if (!has_aborted) return false;
  if (!aborted_since_) aborted_since_ = cpu::Clock::now();
  // It may have learned before this process why a third one does not come.
  return !has_unknown || cpu::Clock::now() - *aborted_since_ > kTimeForAnswer;
}

// The processes that have left or ended, and so cause the failures that the others report. One that has aborted the
// group knows of another cause, also when it has ended since.
std::vector<int> Communicator::gone_processes() const {
  std::vector<int> left, ended;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self()) continue;
    const bool could_not_come = !channel_->has_joined(process) && channel_->has_aborted(process);
    if (could_not_come || how_left(process)) {
      left.push_back(process);
    } else if (channel_->has_exited(process) && !channel_->has_aborted(process)) {
      ended.push_back(process);
    }
  }
  return left.empty() ? ended : left;
}

// A process's announcement when it left, if any.
std::optional<CallFailure> Communicator::how_left(int process) const {
  if (channel_->has_left(process)) {
    CallFailure told = channel_->status_of(process);
    told.cause = std::move(told.text);
    return told;
  }
  if (channel_->has_joined(process)) return std::nullopt;
  return Departures::instance().of(group_.process_id(process));
}

// Fails all calls, now and in future: after a timeout this process no longer knows how far its peers are. If it is
// leaving, it announces that instead of `why`. Called by the thread that runs calls.
void Communicator::abort(CallFailure why) {
  // A peer's first failure, if this failure has no code of its own.
  for (int process = 0; channel_ != nullptr && process < group_.num_processes(); ++process) {
    if (why.code != ErrorCode::deadline_exceeded) break;
    if (process != group_.self() && channel_->has_aborted(process)) why.code = channel_->status_of(process).code;
  }
  std::vector<ExchangePtr> failed;
  const LastCalls last_calls = last_calls_of(group_);  // before they count as failed
  std::optional<CallFailure> leaving;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      leaving = leaving_;
      CallFailure own = why;
      own.text += last_calls.sentence;
      if (leaving) {
        own = *leaving;
        if (own.process == CallFailure::kNone) own.cause.clear();
        own.text = "this process has left its groups of processes: it " + predicate_of(*leaving) + ".";
      }
      failure_ = numbered(std::move(own));
    }
    if (current_ != nullptr) failed.push_back(std::move(current_));
    for (ExchangePtr& exchange : ready_) failed.push_back(std::move(exchange));
    ready_.clear();
    leader_call_.reset();
  }
  left_.notify_all();
  if (channel_ != nullptr) {
    if (leaving) {
      channel_->post_status(leaving->cause);
    } else if (!has_posted_status_) {
      channel_->post_status(why.text);
    }
    channel_->abort(leaving.value_or(why), leaving.has_value());
    std::lock_guard<std::mutex> lock(mutex_);
    channel_.reset();
    memory_.reset();
  }
  // Print before the calls fail, which may end the process at once.
  if (!failed.empty() && !leaving) flight::Recorder::instance().print_once(last_calls.table);
  for (ExchangePtr& exchange : failed) {
    cpu::RendezvousPtr rendezvous = exchange->release();
    cpu::Watchdog::instance().record_failure(rendezvous->run_id, failure_);
    cpu::CompletionThreads::instance().complete(std::move(rendezvous), failure_);
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

// The failure of a call that waits for a process. Its text says what is known of the process.
CallFailure Communicator::failure_by(int process) const {
  if (const auto how = how_left(process)) return failure_by(process, *how);
  using Kind = CallFailure::Kind;
  const CallFailure status = channel_->status_of(process);
  CallFailure found;
  std::string what, more = ".";
  if (!channel_->has_joined(process)) {
    const bool failed = channel_->has_aborted(process);
    found.kind = failed ? status.kind : Kind::absent;
    what = failed ? clause_of(status.text) : "has not made a call in this group yet";
  } else if (channel_->has_aborted(process)) {
    found.kind = Kind::aborted;
    what = "has aborted the group";
    more = ". Last status: " + (status.text.empty() ? "none" : status.text) + ".";
  } else if (channel_->has_exited(process)) {
    found.kind = Kind::ended;
    what = "has ended";
  } else if (!status.text.empty()) {
    found.kind = Kind::mismatch;
    more = "waits in another call: " + status.text + ".";
  } else {
    found.kind = Kind::stopped;
    what = "is stopped, or busy with something else";
  }
  found.process = group_.process_id(process);
  found.rank = group_.ranks_of(process).front();
  if (!what.empty()) found.cause = name_of(process) + " " + what;
  found.text = "P" + name_of(process).substr(1) + " " + what + more;
  // A process that has aborted the group knows who is to blame, unless it blames this process.
  const bool knows = found.kind == Kind::aborted && status.process != CallFailure::kNone &&
                     status.process != group_.process_id(group_.self()) && status.kind != Kind::mismatch;
  if (knows) std::tie(found.kind, found.process, found.rank) = std::tie(status.kind, status.process, status.rank);
  return found;
}

// The failure by a process that has left. how: its announcement.
CallFailure Communicator::failure_by(int process, const CallFailure& how) const {
  CallFailure found = how;
  found.text = "P" + name_of(process).substr(1) + " " + predicate_of(how) + ".";
  if (how.process == group_.process_id(group_.self())) {  // it blames this process, so no other is known
    found.process = CallFailure::kNone;
    found.cause.clear();
  }
  if (how.process != CallFailure::kNone) return found;
  found.process = group_.process_id(process);
  found.rank = group_.ranks_of(process).front();
  found.cause = name_of(process) + " " + how.cause;
  return found;
}

// The failure by the first of these processes. Its text says what is known of all, each after a space.
CallFailure Communicator::failure_by(const std::vector<int>& processes) const {
  CallFailure found;
  std::string text;
  for (int process : processes) {
    const CallFailure next = failure_by(process);
    if (text.empty()) found = next;
    text += " " + next.text;
  }
  found.text = text;
  return found;
}

CallFailure Communicator::failure_of_missing_processes(const Exchange& exchange) const {
  std::vector<int> missing;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (exchange.is_missing(process, *channel_, next_round_)) missing.push_back(process);
  }
  const std::vector<int> culprits = gone_processes();
  CallFailure failure = failure_by(culprits.empty() ? missing : culprits);
  std::ostringstream text;
  text << *exchange.call().text << ": process " << group_.process_id(group_.self()) << " waited for " << missing.size()
       << " of the group's " << group_.num_processes() << " processes, for " << seconds_waited() << " s."
       << failure.text;
  if (culprits.empty()) {
    text << " Every process must make the same calls: look for an error or an early exit there (an exception in a "
            "callback is in its standard error), and for a branch or a loop whose condition differs between processes. "
            "If "
            "the others are only slow, set JAX_RING_TIMEOUT_S to more seconds.";
    const bool looks_alike = std::any_of(missing.begin(), missing.end(), [&](int process) {
      return channel_->has_joined(process) && channel_->status_of(process).text == *exchange.call().text;
    });
    if (looks_alike) {
      text << " The other call reads like this one: it comes earlier or later in the program, or the program differs, "
              "by a constant, say.";
    }
  }
  failure.text = text.str();
  return failure;
}

// How long the current step has waited.
std::string Communicator::seconds_waited() const {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2)
       << std::chrono::duration<double>(Pauses::instance().run_since(*waiting_since_)).count();
  return text.str();
}

}  // namespace jax_ring::shm
