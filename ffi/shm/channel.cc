// channel.cc: the signals between processes, and the status each one posts.
#include "shm/channel.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>

namespace jax_ring::shm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes could not share them");

// Values of Signals::aborted, which is zero at first.
constexpr uint32_t kAborted = 1, kLeft = 2;

// Identifies the pid namespace: the same pid in another namespace is another process.
int64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<int64_t>(status.st_ino) : 0;
}

struct ProcessStat {
  char state;
  int64_t start_time;  // distinguishes the process from a later one with the same pid
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

}  // namespace

size_t Channel::bytes(int num_processes, const Capacity& capacity) { return num_processes * area_bytes(capacity); }

Channel::Channel(unsigned char* memory, int num_processes, int self, const Capacity& capacity)
    : memory_(memory), num_processes_(num_processes), self_(self), capacity_(capacity) {}

void Channel::ring_doorbell() {
  Area& own = area(self_);
  // seq_cst on both sides: either this process sees the waiter, or the waiter sees the new doorbell value and does not
  // sleep.
  own.signals.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (own.waiters.count.load(std::memory_order_seq_cst) != 0) futex_wake(own.signals.doorbell);
}

void Channel::signal_staged(uint32_t round, uint64_t call) {
  Signals& signals = area(self_).signals;
  // The call needs its own release: when a round is staged again, it is the only word that changes.
  signals.calls[round % 2].store(call, std::memory_order_release);
  signals.staged.store(round, std::memory_order_release);
  ring_doorbell();
}

std::optional<uint64_t> Channel::staged_call(int process, uint32_t round) const {
  const Signals& signals = area(process).signals;
  if (is_before(signals.staged.load(std::memory_order_acquire), round)) return std::nullopt;
  return signals.calls[round % 2].load(std::memory_order_acquire);
}

bool Channel::has_staged(int process, uint32_t round, uint64_t call) const {
  return staged_call(process, round) == call;
}

void Channel::signal_results(uint32_t round) {
  area(self_).signals.results.store(round, std::memory_order_release);
  ring_doorbell();
}

bool Channel::has_results(int process, uint32_t round) const {
  return !is_before(area(process).signals.results.load(std::memory_order_acquire), round);
}

void Channel::skip_results(uint32_t round) { area(self_).signals.results.store(round, std::memory_order_relaxed); }

void Channel::post_status(const std::string& text) {
  Status& status = area(self_).status;
  size_t length = std::min(text.size(), sizeof(status.text));
  const auto is_continued = [&] { return length < text.size() && (text[length] & 0xc0) == 0x80; };
  while (is_continued()) --length;  // never half a UTF-8 character, which a Python exception could not hold
  status.length.store(0, std::memory_order_release);
  std::memcpy(status.text, text.data(), length);
  status.length.store(static_cast<uint32_t>(length), std::memory_order_release);
}

std::string Channel::status_of(int process) const {
  const Status& status = area(process).status;
  const size_t length = status.length.load(std::memory_order_acquire);
  return std::string(status.text, std::min(length, sizeof(status.text)));
}

void Channel::abort(bool leaves) {
  area(self_).signals.aborted.store(leaves ? kLeft : kAborted, std::memory_order_release);
  ring_doorbell();
}

bool Channel::has_aborted(int process) const {
  return area(process).signals.aborted.load(std::memory_order_acquire) != 0;
}

bool Channel::has_left(int process) const {
  return area(process).signals.aborted.load(std::memory_order_acquire) == kLeft;
}

void Channel::join() {
  Status& status = area(self_).status;
  const auto stat = read_process_stat(getpid());
  status.start_time.store(stat ? stat->start_time : 0, std::memory_order_relaxed);
  status.pid_namespace.store(pid_namespace(), std::memory_order_relaxed);
  status.pid.store(getpid(), std::memory_order_release);
}

bool Channel::has_joined(int process) const { return area(process).status.pid.load(std::memory_order_acquire) != 0; }

bool Channel::has_exited(int process) const {
  const Status& status = area(process).status;
  const int64_t pid = status.pid.load(std::memory_order_acquire);
  if (pid == 0 || status.pid_namespace.load(std::memory_order_relaxed) != pid_namespace()) return false;
  if (kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  // A killed process keeps its pid until its parent reaps it.
  const auto stat = read_process_stat(pid);
  const int64_t start_time = status.start_time.load(std::memory_order_relaxed);
  return stat && (stat->state == 'Z' || stat->state == 'X' || (start_time != 0 && stat->start_time != start_time));
}

uint32_t Channel::doorbell(int process) const { return area(process).signals.doorbell.load(std::memory_order_acquire); }

void Channel::wait_doorbell(int process, uint32_t seen, std::chrono::nanoseconds timeout) const {
  Area& other = area(process);
  other.waiters.count.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(other.signals.doorbell, seen, timeout);
  other.waiters.count.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace jax_ring::shm
