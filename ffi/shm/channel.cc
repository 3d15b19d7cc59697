// channel.cc: the signals between processes, and what they say of themselves.
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

// What tells the namespaces of process ids apart: the same id means another process in another one.
int64_t pid_space() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<int64_t>(status.st_ino) : 0;
}

struct Life {
  char state;
  int64_t began;  // of the process: tells it from a later one that has been given the same id
};

// Nothing where the system does not say.
std::optional<Life> life_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text, skipped;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  Life life;
  fields >> life.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return fields >> life.began ? std::optional(life) : std::nullopt;
}

}  // namespace

size_t Channel::bytes(int num_processes, const Capacity& capacity) { return num_processes * area_bytes(capacity); }

Channel::Channel(unsigned char* memory, int num_processes, int self, const Capacity& capacity)
    : memory_(memory), num_processes_(num_processes), self_(self), capacity_(capacity) {}

void Channel::ring_bell() {
  Area& own = area(self_);
  // Both in one order for all processes: either a sleeper is seen here, or it sees the new bell and does not sleep.
  own.signals.bell.fetch_add(1, std::memory_order_seq_cst);
  if (own.sleepers.count.load(std::memory_order_seq_cst) != 0) futex_wake(own.signals.bell);
}

void Channel::announce_staged(uint32_t round, uint64_t call) {
  Signals& signals = area(self_).signals;
  // Released on its own as well: of a round that is staged again nothing else changes.
  signals.calls[round % 2].store(call, std::memory_order_release);
  signals.staged.store(round, std::memory_order_release);
  ring_bell();
}

std::optional<uint64_t> Channel::call_of(int process, uint32_t round) const {
  const Signals& signals = area(process).signals;
  if (is_before(signals.staged.load(std::memory_order_acquire), round)) return std::nullopt;
  return signals.calls[round % 2].load(std::memory_order_acquire);
}

bool Channel::has_staged(int process, uint32_t round, uint64_t call) const { return call_of(process, round) == call; }

void Channel::announce_results(uint32_t round) {
  area(self_).signals.results.store(round, std::memory_order_release);
  ring_bell();
}

bool Channel::has_results(int process, uint32_t round) const {
  return !is_before(area(process).signals.results.load(std::memory_order_acquire), round);
}

void Channel::pass_results(uint32_t round) { area(self_).signals.results.store(round, std::memory_order_relaxed); }

void Channel::say(const std::string& text) {
  Board& board = area(self_).board;
  size_t length = std::min(text.size(), sizeof(board.text));
  const auto is_continued = [&] { return length < text.size() && (text[length] & 0xc0) == 0x80; };
  while (is_continued()) --length;  // no half a character: a Python exception could not hold it
  board.length.store(0, std::memory_order_release);
  std::memcpy(board.text, text.data(), length);
  board.length.store(static_cast<uint32_t>(length), std::memory_order_release);
}

std::string Channel::said(int process) const {
  const Board& board = area(process).board;
  const size_t length = board.length.load(std::memory_order_acquire);
  return std::string(board.text, std::min(length, sizeof(board.text)));
}

void Channel::give_up() {
  area(self_).signals.gave_up.store(1, std::memory_order_release);
  ring_bell();
}

bool Channel::gave_up(int process) const { return area(process).signals.gave_up.load(std::memory_order_acquire) != 0; }

void Channel::enter() {
  Board& board = area(self_).board;
  const auto life = life_of(getpid());
  board.began.store(life ? life->began : 0, std::memory_order_relaxed);
  board.pid_space.store(pid_space(), std::memory_order_relaxed);
  board.pid.store(getpid(), std::memory_order_release);
}

bool Channel::has_entered(int process) const { return area(process).board.pid.load(std::memory_order_acquire) != 0; }

bool Channel::has_ended(int process) const {
  const Board& board = area(process).board;
  const int64_t pid = board.pid.load(std::memory_order_acquire);
  if (pid == 0 || board.pid_space.load(std::memory_order_relaxed) != pid_space()) return false;
  if (kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  // One that was killed keeps its id until its parent looks.
  const auto life = life_of(pid);
  const int64_t began = board.began.load(std::memory_order_relaxed);
  return life && (life->state == 'Z' || life->state == 'X' || (began != 0 && life->began != began));
}

uint32_t Channel::bell(int process) const { return area(process).signals.bell.load(std::memory_order_acquire); }

void Channel::sleep(int process, uint32_t seen, std::chrono::nanoseconds longest) const {
  Area& other = area(process);
  other.sleepers.count.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(other.signals.bell, seen, longest);
  other.sleepers.count.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace jax_ring::shm
