// communicator_failure.cc: when the group's calls cannot complete, which process is to blame, and what they fail with.
#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

#include "base/error_code.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/watchdog.h"
#include "shm/group/communicator.h"
#include "shm/peers/arrivals.h"
#include "shm/peers/departures.h"

namespace jax_ring::shm {
namespace {

// How long an answer about a process that shares no memory with this one may take.
constexpr std::chrono::milliseconds kTimeForAnswer(500);

}  // namespace

// Whether the group cannot complete the current call: what a process has staged before it went is there by now, and it
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
  // It may have heard before this process why a third one does not come.
  return !has_unknown || cpu::Clock::now() - *aborted_since_ > kTimeForAnswer;
}

// The processes that have left or ended, and so are the cause of whatever the others report.
std::vector<int> Communicator::gone_processes() const {
  std::vector<int> left, ended;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self()) continue;
    const bool could_not_come = !channel_->has_joined(process) && channel_->has_aborted(process);
    if (could_not_come || how_left(process)) {
      left.push_back(process);
    } else if (channel_->has_exited(process)) {
      ended.push_back(process);
    }
  }
  return left.empty() ? ended : left;
}

// How a process has left, if it has.
std::optional<std::string> Communicator::how_left(int process) const {
  if (channel_->has_left(process)) return channel_->status_of(process);
  if (channel_->has_joined(process)) return std::nullopt;
  return Departures::instance().of(group_.process_id(process));
}

// Fails all calls, now and in future: after a timeout this process no longer knows how far its peers are. If it is
// leaving, it says so instead of `why`. Called by the thread that runs calls.
void Communicator::abort(std::string why) {
  why.insert(0, code_of_peers(why));
  std::vector<ExchangePtr> failed;
  const LastCalls last_calls = last_calls_of(group_);  // before they count as failed
  std::optional<std::string> leaving;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      leaving = leaving_;
      failure_ =
          leaving_ ? "this process has left its groups of processes: it " + *leaving_ + "." : why + last_calls.sentence;
    }
    if (current_ != nullptr) failed.push_back(std::move(current_));
    for (ExchangePtr& exchange : ready_) failed.push_back(std::move(exchange));
    ready_.clear();
    leader_call_.reset();
  }
  left_.notify_all();
  if (channel_ != nullptr) {
    if (leaving) {
      channel_->post_status(*leaving);
    } else if (!has_posted_status_) {
      channel_->post_status(why);
    }
    channel_->abort(leaving.has_value());
    std::lock_guard<std::mutex> lock(mutex_);
    channel_.reset();
    memory_.reset();
  }
  // Before the calls fail, which may end the process at once.
  if (!failed.empty() && !leaving) flight::Recorder::instance().print_once(last_calls.table);
  for (ExchangePtr& exchange : failed) {
    cpu::RendezvousPtr rendezvous = exchange->release();
    cpu::Watchdog::instance().record_failure(rendezvous->run_id, *failure_);
    cpu::CompletionThreads::instance().complete(std::move(rendezvous), *failure_);
  }
}

// The code that a failure takes over from a peer, which failed first. Empty if the failure has a code of its own.
std::string_view Communicator::code_of_peers(std::string_view why) const {
  if (channel_ == nullptr || !code_name_of(why).empty()) return "";
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (process == group_.self() || !channel_->has_aborted(process)) continue;
    const std::string_view code = code_name_of(channel_->status_of(process));
    if (!code.empty()) return code;
  }
  return "";
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
  const std::string status(without_code(channel_->status_of(process)));
  if (const auto how = how_left(process)) {
    text << *how << ".";
  } else if (!channel_->has_joined(process)) {
    const bool failed = channel_->has_aborted(process);
    text << (failed ? status : "has not made a call in this group yet.");
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

std::string Communicator::describe_peers(const std::vector<int>& processes) const {
  std::string text;
  for (int process : processes) text += " " + describe_peer(process);
  return text;
}

std::string Communicator::describe_missing_processes(const Exchange& exchange) const {
  std::vector<int> missing;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (exchange.is_missing(process, *channel_, next_round_)) missing.push_back(process);
  }
  const std::vector<int> culprits = gone_processes();
  std::ostringstream text;
  text << *exchange.call().text << ": process " << group_.process_id(group_.self()) << " waited for " << missing.size()
       << " of the group's " << group_.num_processes() << " processes, for " << seconds_waited() << " s."
       << describe_peers(culprits.empty() ? missing : culprits);
  if (culprits.empty()) {
    text << " Every process must make the same calls: look for an error or an early exit there, and for a branch or a "
            "loop whose condition differs between processes. If the others are only slow, set JAX_RING_TIMEOUT_S to "
            "more seconds.";
    const bool looks_alike = std::any_of(missing.begin(), missing.end(), [&](int process) {
      return channel_->has_joined(process) && channel_->status_of(process) == *exchange.call().text;
    });
    if (looks_alike) {
      text << " The other call reads like this one: it comes earlier or later in the program, or the program differs, "
              "by a constant, say.";
    }
  }
  return text.str();
}

// How long the current step has waited.
std::string Communicator::seconds_waited() const {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2)
       << std::chrono::duration<double>(cpu::Clock::now() - *waiting_since_).count();
  return text.str();
}

}  // namespace jax_ring::shm
