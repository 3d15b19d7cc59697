// channel.cc: the signals between processes, and each one's posted status.
#include "shm/exchange/channel.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "base/cores.h"
#include "base/printable.h"

namespace jax_ring::shm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes could not share them");

// After many refusals, at most this many calls do not ask for a larger segment. Asking takes some microseconds.
constexpr uint32_t kMostSkipped = 1024;

// Values of Signals::aborted, which is zero at first.
constexpr uint32_t kAborted = 1, kLeft = 2;

// Identifies the pid namespace: equal pids in different namespaces are different processes.
int64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<int64_t>(status.st_ino) : 0;
}

struct ProcessStat {
  char state;
  int64_t start_time;  // tells the process from a later one with the same pid
};

// nullopt if /proc has no such entry.
std::optional<ProcessStat> read_process_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text, skipped;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t name_end = text.rfind(')');  // the name may contain anything, including ')'
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  ProcessStat stat;
  fields >> stat.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return fields >> stat.start_time ? std::optional(stat) : std::nullopt;
}

// What another process has written may be any number.
ErrorCode code_of(int64_t number) {
  for (ErrorCode known : {ErrorCode::invalid_argument, ErrorCode::deadline_exceeded, ErrorCode::resource_exhausted,
                          ErrorCode::failed_precondition}) {
    if (number == static_cast<int64_t>(known)) return known;
  }
  return ErrorCode::internal;
}
CallFailure::Kind kind_of(int64_t number) {
  using Kind = CallFailure::Kind;
  return number >= 0 && number < static_cast<int64_t>(Kind::count) ? static_cast<Kind>(number) : Kind::other;
}
int64_t index_of(int64_t number) { return std::max(number, CallFailure::kNone); }

}  // namespace

size_t Channel::bytes(int num_processes, const Capacities& capacities) {
  return num_processes * (sizeof(Area) + bytes_of_values(capacities[0]));
}

Channel::Channel(unsigned char* memory, int num_processes, int self, const Capacities& capacities, Segments* segments)
    : memory_(memory),
      num_processes_(num_processes),
      self_(self),
      capacities_(capacities),
      segments_(segments),
      values_(memory + num_processes * sizeof(Area)) {}

Channel::~Channel() { unlink_offer(); }

void Channel::unlink_offer() {
  if (segments_ == nullptr) return;
  const uint32_t number = area(0).growth.offered.load(std::memory_order_relaxed) / kLevels;
  if (number != 0) segments_->unlink(number);
}

void Channel::ring_doorbell() {
  Area& own = area(self_);
  // A release: whoever finds the new value before it sleeps must also find the signaled data.
  own.signals.doorbell.store(own.signals.doorbell.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  // Both sides change the count: either this process sees the waiter, or the waiter sees the new doorbell value and
  // does not sleep. The count's line stays in this process's cache while nobody sleeps; changing the doorbell that way
  // would wait for the line that the peers poll.
  if (own.notices.waiters.fetch_add(0, std::memory_order_acq_rel) != 0) futex_wake(own.signals.doorbell);
}

void Channel::signal_staged(uint32_t round, uint64_t call, bool growth) {
  Signals& signals = area(self_).signals;
  // The call needs its own release: if a round is staged again, this is the only word that changes.
  signals.calls[round % 2].store(call << 1 | growth, std::memory_order_release);
  signals.staged.store(round, std::memory_order_release);
  ring_doorbell();
}

void Channel::post_arrival(uint32_t round, uint64_t arrival) {
  area(self_).signals.arrivals[round % 2].store(arrival, std::memory_order_relaxed);
}

uint64_t Channel::arrival_of(int process, uint32_t round) const {
  return area(process).signals.arrivals[round % 2].load(std::memory_order_relaxed);
}

std::optional<uint64_t> Channel::staged_word(int process, uint32_t round) const {
  const Signals& signals = area(process).signals;
  if (is_before(signals.staged.load(std::memory_order_acquire), round)) return std::nullopt;
  return signals.calls[round % 2].load(std::memory_order_acquire);
}

std::optional<uint64_t> Channel::staged_call(int process, uint32_t round) const {
  const std::optional<uint64_t> word = staged_word(process, round);
  return word ? std::optional(*word >> 1) : std::nullopt;
}

bool Channel::has_staged(int process, uint32_t round, uint64_t call, bool growth) const {
  return staged_word(process, round) == (call << 1 | growth);
}

void Channel::offer(int level) {
  offer_ = ++last_offer_ * kLevels + level;
  // Relaxed, here and below: the next signal of a round from this thread is a release.
  area(self_).growth.offered.store(offer_, std::memory_order_relaxed);
  area(self_).growth.mapped.store(offer_, std::memory_order_relaxed);
}

bool Channel::offer_growth(int level) {
  if (calls_to_skip_ > 0) {
    --calls_to_skip_;
  } else if (level > level_) {
    for (; level > level_; --level) {
      // Set this first: if this process is killed now, the others remove the segment.
      area(self_).growth.offered.store((last_offer_ + 1) * kLevels + level, std::memory_order_relaxed);
      accepted_ = segments_->create(last_offer_ + 1, num_processes_ * bytes_of_values(capacities_[level]));
      if (accepted_ != nullptr) return offer(level), true;
    }
    skip_calls();
  }
  if (!has_retired_) return false;
  offer(0);
  return true;
}

void Channel::skip_calls() {
  calls_to_skip_ = skip_next_time_;
  skip_next_time_ = std::min(2 * skip_next_time_, kMostSkipped);
}

void Channel::accept_growth() {
  const Growth& leaders = area(0).growth;
  if (leaders.retired.load(std::memory_order_relaxed) == in_use_) use_first_segment();
  // Read once: what is mapped here must also be what this process uses.
  offer_ = leaders.offered.load(std::memory_order_relaxed);
  const uint32_t level = offer_ % kLevels;
  if (level > 0 && level < capacities_.size()) {
    accepted_ = segments_->open(offer_ / kLevels, num_processes_ * bytes_of_values(capacities_[level]));
  }
  const bool has_it = level == 0 || accepted_ != nullptr;
  area(self_).growth.mapped.store(has_it ? offer_ : kRefused, std::memory_order_relaxed);
}

void Channel::finish_growth() {
  const uint32_t level = offer_ % kLevels;
  if (accepted_ != nullptr && self_ == 0) segments_->unlink(offer_ / kLevels);
  has_retired_ = false;
  bool have_all = level == 0 || accepted_ != nullptr;
  for (int process = 0; process < num_processes_; ++process) {
    have_all = have_all && area(process).growth.mapped.load(std::memory_order_relaxed) == offer_;
  }
  if (!have_all) {
    accepted_.reset();
    return skip_calls();
  }
  if (level == 0) return use_first_segment();
  grown_ = std::move(accepted_);
  values_ = grown_.get();
  level_ = static_cast<int>(level);
  in_use_ = offer_;
}

void Channel::use_first_segment() {
  grown_.reset();
  values_ = memory_ + num_processes_ * sizeof(Area);
  level_ = 0;
  in_use_ = 0;
}

void Channel::release_idle() {
  if (level_ == 0) return;
  Growth& leaders = area(0).growth;
  if (self_ == 0) {
    leaders.retired.store(in_use_, std::memory_order_relaxed);
    has_retired_ = true;
  } else if (leaders.retired.load(std::memory_order_relaxed) != in_use_) {
    return;
  }
  use_first_segment();
}

void Channel::signal_results(uint32_t round) {
  area(self_).signals.results.store(round, std::memory_order_release);
  ring_doorbell();
}

bool Channel::has_results(int process, uint32_t round) const {
  return !is_before(area(process).signals.results.load(std::memory_order_acquire), round);
}

void Channel::skip_results(uint32_t round) { area(self_).signals.results.store(round, std::memory_order_release); }

void Channel::post_status(const std::string& text) {
  Status& status = area(self_).status;
  size_t length = std::min(text.size(), sizeof(status.text));
  const auto is_continued = [&] { return length < text.size() && (text[length] & 0xc0) == 0x80; };
  while (is_continued()) --length;  // never cut a UTF-8 character: a Python exception could not hold half of one
  status.length.store(0, std::memory_order_release);
  std::memcpy(status.text, text.data(), length);
  status.length.store(static_cast<uint32_t>(length), std::memory_order_release);
}

CallFailure Channel::status_of(int process) const {
  const Status& status = area(process).status;
  const size_t length = status.length.load(std::memory_order_acquire);
  if (length == 0 && segments_ != nullptr && !has_joined(process)) {
    if (std::optional<CallFailure> failure = segments_->failure_of(process)) return *failure;
  }
  CallFailure posted;
  // From a copy: the other process may write meanwhile.
  posted.text = printable(std::string(status.text, std::min(length, sizeof(status.text))));
  if (area(process).signals.aborted.load(std::memory_order_acquire) == 0) return posted;
  posted.code = code_of(status.code.load(std::memory_order_relaxed));
  posted.kind = kind_of(status.kind.load(std::memory_order_relaxed));
  posted.process = index_of(status.process.load(std::memory_order_relaxed));
  posted.rank = index_of(status.rank.load(std::memory_order_relaxed));
  return posted;
}

void Channel::abort(const CallFailure& why, bool leaves) {
  Status& status = area(self_).status;
  status.code.store(static_cast<int64_t>(why.code), std::memory_order_relaxed);
  status.kind.store(static_cast<int64_t>(why.kind), std::memory_order_relaxed);
  status.process.store(why.process, std::memory_order_relaxed);
  status.rank.store(why.rank, std::memory_order_relaxed);
  area(self_).signals.aborted.store(leaves ? kLeft : kAborted, std::memory_order_release);
  for (int process = 0; process < num_processes_; ++process) {
    area(process).notices.of_abort.store(1, std::memory_order_release);
  }
  ring_doorbell();
  unlink_offer();  // the leader may be dead
}

bool Channel::has_aborted(int process) const {
  if (area(process).signals.aborted.load(std::memory_order_acquire) != 0) return true;
  // A process that could not map this memory reports it by other means.
  return segments_ != nullptr && !has_joined(process) && segments_->failure_of(process).has_value();
}

bool Channel::has_left(int process) const {
  return area(process).signals.aborted.load(std::memory_order_acquire) == kLeft;
}

void Channel::join() {
  Status& status = area(self_).status;
  const auto stat = read_process_stat(getpid());
  status.start_time.store(stat ? stat->start_time : 0, std::memory_order_relaxed);
  status.pid_namespace.store(pid_namespace(), std::memory_order_relaxed);
  for (int core : usable_cores()) status.cores[core / 64].fetch_or(uint64_t{1} << core % 64, std::memory_order_relaxed);
  status.pid.store(getpid(), std::memory_order_release);
}

bool Channel::has_joined(int process) const { return area(process).status.pid.load(std::memory_order_acquire) != 0; }

int Channel::num_cores() const {
  size_t count = 0;
  for (size_t word = 0; word < std::size(area(0).status.cores); ++word) {
    std::bitset<64> together;
    for (int process = 0; process < num_processes_; ++process) {
      together |= has_joined(process) ? area(process).status.cores[word].load(std::memory_order_relaxed) : 0;
    }
    count += together.count();
  }
  return count > 0 ? static_cast<int>(count) : jax_ring::num_cores();
}

int64_t Channel::pid_of(int process) const {
  const Status& status = area(process).status;
  const int64_t pid = status.pid.load(std::memory_order_acquire);
  return status.pid_namespace.load(std::memory_order_relaxed) == pid_namespace() ? pid : 0;
}

bool Channel::has_exited(int process) const {
  const Status& status = area(process).status;
  const int64_t pid = status.pid.load(std::memory_order_acquire);
  if (pid == 0 || status.pid_namespace.load(std::memory_order_relaxed) != pid_namespace()) return false;
  if (kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  // A killed process keeps its pid until its parent reaps it.
  const auto stat = read_process_stat(pid);
  if (!stat) return kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;  // it may have been reaped just now
  const int64_t start_time = status.start_time.load(std::memory_order_relaxed);
  return stat->state == 'Z' || stat->state == 'X' || (start_time != 0 && stat->start_time != start_time);
}

uint32_t Channel::doorbell(int process) const { return area(process).signals.doorbell.load(std::memory_order_acquire); }

void Channel::wait_doorbell(int process, uint32_t seen, std::chrono::nanoseconds timeout) const {
  Area& other = area(process);
  other.notices.waiters.fetch_add(1, std::memory_order_acq_rel);
  futex_wait(other.signals.doorbell, seen, timeout);
  other.notices.waiters.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace jax_ring::shm
