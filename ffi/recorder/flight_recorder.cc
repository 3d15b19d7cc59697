// flight_recorder.cc: creates this process's record memory, finds its peers', and reads both.
#include "recorder/flight_recorder.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/hash.h"
#include "base/printable.h"

namespace jax_ring::flight {
namespace {

constexpr char kName[] = "jax_ring_flight";
// Nobody truncates the memory while a peer reads it, which would end the peer by SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint64_t kMagic = 0x6a61785f72696e01;  // the last byte is the version of the layout

// The numbers in a folder of /proc, such as processes or one process's open files.
std::vector<int64_t> numbers_in(const std::string& folder) {
  std::vector<int64_t> numbers;
  DIR* const directory = opendir(folder.c_str());
  if (directory == nullptr) return numbers;
  while (const dirent* entry = readdir(directory)) {
    char* end = nullptr;
    const int64_t number = std::strtoll(entry->d_name, &end, 10);
    if (end != entry->d_name && *end == '\0') numbers.push_back(number);
  }
  closedir(directory);
  return numbers;
}

// Copies a record; returns false if it is empty, changed meanwhile, or is none that a recorder writes. Another process
// may write anything at any time, so what is checked is the copy.
bool read_record(const Memory& memory, const Record& record, Seen& seen) {
  constexpr auto order = std::memory_order_acquire;
  seen.sequence = record.sequence.load(order);
  if (seen.sequence == 0 || seen.sequence == kBusy) return false;
  // Read the state first: a call writes the other fields before it, so they are not older.
  seen.state = record.state.load(order);
  seen.id = record.id.load(order);
  seen.entered = record.entered.load(order);
  seen.ready = record.ready.load(order);
  seen.ended = record.ended.load(order);
  seen.arrived = record.arrived.load(order);
  seen.call = record.call.load(order);
  seen.group = record.group.load(order);
  seen.members = record.members.load(order);
  seen.last = record.last.load(order);
  if (record.sequence.load(std::memory_order_relaxed) != seen.sequence) return false;
  if (seen.state > State::failed || std::min({seen.entered, seen.ready, seen.ended}) < 0) return false;
  if (seen.call >= std::min<size_t>(memory.num_calls.load(order), kMaxCalls)) return false;
  char text[kTextBytes];
  std::memcpy(text, memory.texts[seen.call], kTextBytes);
  seen.text = printable({text, strnlen(text, kTextBytes)});
  return true;
}

Snapshot read_memory(const Memory& memory) {
  Snapshot snapshot{memory.process.load(std::memory_order_acquire), memory.job.load(std::memory_order_acquire), 0, {}};
  for (const Record& record : memory.records) {
    Seen seen;
    if (read_record(memory, record, seen)) snapshot.records.push_back(std::move(seen));
  }
  std::sort(snapshot.records.begin(), snapshot.records.end(),
            [](const Seen& a, const Seen& b) { return a.sequence < b.sequence; });
  return snapshot;
}

std::string key_of(std::string_view text, std::string_view collective, const std::vector<Members>& groups) {
  std::string key(text);
  key.append("\n").append(collective);
  for (const Members& group : groups) {
    key.push_back('\n');
    for (size_t i = 0; i < group.positions.size(); ++i) {
      key += std::to_string(group.positions[i]) + ":" + std::to_string(group.processes[i]) + " ";
    }
  }
  return key;
}

void write_text(char (&to)[kTextBytes], std::string_view text) {
  size_t length = std::min(text.size(), kTextBytes - 1);
  // Never cut a UTF-8 character: a Python string could not hold half of one.
  while (length < text.size() && length > 0 && (text[length] & 0xc0) == 0x80) --length;
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

}  // namespace

bool Members::is_within_process() const {
  return std::all_of(processes.begin(), processes.end(), [this](int64_t process) { return process == processes[0]; });
}

uint32_t hash_of(const Members& members) {
  Hash hash;
  for (size_t i = 0; i < members.positions.size(); ++i) hash.add(members.positions[i]).add(members.processes[i]);
  return std::max<uint32_t>(hash.value32(), 1);
}

Recorder::Recorder() { create(); }

// Anonymous memory private to this process, for when it may open no more files.
void Recorder::create() {
  file_ = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool shared = file_ >= 0 && ftruncate(file_, sizeof(Memory)) == 0;
  if (shared) fcntl(file_, F_ADD_SEALS, kSeals);
  void* const at = mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE,
                        shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, shared ? file_ : -1, 0);
  if (at == MAP_FAILED) {
    on_ = false;
    return;
  }
  memory_ = {static_cast<Memory*>(at), [](Memory*) {}};  // never unmapped: threads may outlive main
  memory_->process.store(0, std::memory_order_relaxed);
  memory_->magic.store(kMagic, std::memory_order_release);
}

void Recorder::leave_parent() {
  if (file_ >= 0) close(file_);
  memory_.reset();
  create();
}

Recorder& Recorder::instance() {
  // Never destroyed: threads may outlive main.
  static auto* const recorder = new Recorder;
  return *recorder;
}

void Recorder::turn_off() { on_ = false; }

RecordedCall* Recorder::add(std::string_view text, std::string_view collective, std::vector<Members> groups) {
  if (!on_) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_full = calls_.size() + 1 >= kMaxCalls;
  if (is_full) text = "one of many other calls";
  RecordedCall*& found = by_key_[key_of(text, collective, groups)];
  if (found != nullptr) return found;
  auto call = std::make_unique<RecordedCall>();
  // Calls that share the text of the last one have counters of their own.
  call->index = static_cast<uint16_t>(is_full ? kMaxCalls - 1 : calls_.size());
  call->text = text;
  call->collective = collective;
  std::vector<size_t> sizes;
  for (const Members& group : groups) {
    sizes.push_back(group.positions.size());
    call->hashes.push_back(group.is_within_process() ? 0 : hash_of(group));
  }
  call->groups = std::move(groups);
  call->statistics = std::make_unique<CallStatistics>(sizes);
  write_text(memory_->texts[call->index], text);
  memory_->num_calls.store(call->index + 1, std::memory_order_release);
  found = call.get();
  calls_.push_back(std::move(call));
  return found;
}

std::vector<RecordedCall*> Recorder::calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<RecordedCall*> calls;
  for (const auto& call : calls_) calls.push_back(call.get());
  return calls;
}

void Recorder::join(int64_t process, const std::string& label) {
  if (memory_ == nullptr) return;
  memory_->process.store(process, std::memory_order_relaxed);
  memory_->job.store(Hash().add(std::string_view(label)).value(), std::memory_order_release);
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.clear();
  has_printed_ = false;
}

Recorder::Found Recorder::open_memory_of(int64_t pid, bool of_any_user) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd/";
  for (int64_t number : numbers_in(folder)) {
    const std::string path = folder + std::to_string(number);
    char target[PATH_MAX];
    const ssize_t length = readlink(path.c_str(), target, sizeof(target));
    if (length < 0 || std::string_view(target, length).find(kName) == std::string_view::npos) continue;
    // Anything may have this name, as a device, which is in use once it is opened.
    const int seen = open(path.c_str(), O_PATH | O_CLOEXEC);
    if (seen < 0) continue;
    struct stat status;
    const bool is_memory = fstat(seen, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0 &&
                           (of_any_user || status.st_uid == geteuid()) &&
                           static_cast<size_t>(status.st_size) == sizeof(Memory);
    const int file = is_memory ? open(("/proc/self/fd/" + std::to_string(seen)).c_str(),
                                      O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)
                               : -1;
    close(seen);
    if (file < 0) continue;
    void* at = MAP_FAILED;
    const int seals = fcntl(file, F_GET_SEALS);
    if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) {
      at = mmap(nullptr, sizeof(Memory), PROT_READ, MAP_SHARED, file, 0);
    }
    close(file);
    if (at == MAP_FAILED) continue;
    std::shared_ptr<const Memory> memory(static_cast<const Memory*>(at), [](const Memory* mapped) {
      munmap(const_cast<Memory*>(mapped), sizeof(Memory));
    });
    if (memory->magic.load(std::memory_order_acquire) == kMagic) return {memory, status.st_uid};
  }
  return {};
}

void Recorder::open_peer(int64_t process, int64_t pid) {
  if (pid == 0 || pid == getpid()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = peers_.find(process);
    if (found != peers_.end() && found->second.pid == pid) return;
  }
  std::shared_ptr<const Memory> memory = open_memory_of(pid, /*of_any_user=*/false).memory;
  if (memory == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  peers_[process] = {pid, std::move(memory)};
}

Snapshot Recorder::read_own() const { return memory_ == nullptr ? Snapshot{} : read_memory(*memory_); }

std::vector<Snapshot> Recorder::read() const {
  std::vector<Snapshot> snapshots{read_own()};
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [process, peer] : peers_) {
    snapshots.push_back(read_memory(*peer.memory));
    snapshots.back().process = process;  // the peer may have joined another job meanwhile
  }
  return snapshots;
}

std::map<int64_t, Snapshot> Recorder::read_host(bool of_all_users) {
  std::map<int64_t, Snapshot> snapshots;
  for (int64_t pid : numbers_in("/proc")) {
    struct stat process;
    if (stat(("/proc/" + std::to_string(pid)).c_str(), &process) != 0) continue;
    if (!of_all_users && process.st_uid != geteuid()) continue;
    const auto [memory, owner] = open_memory_of(pid, of_all_users);
    if (memory == nullptr) continue;
    Snapshot snapshot = read_memory(*memory);
    if (snapshot.process < 0 || snapshot.process > INT32_MAX) continue;
    snapshot.user = owner;
    snapshots[pid] = std::move(snapshot);
  }
  return snapshots;
}

void Recorder::print_once(const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text.empty() || std::exchange(has_printed_, true)) return;
  }
  // If poll() calls a pipe writable, it has room for PIPE_BUF bytes.
  for (size_t at = 0; at < text.size();) {
    pollfd out{STDERR_FILENO, POLLOUT, 0};
    if (poll(&out, 1, 0) != 1 || (out.revents & POLLOUT) == 0) return;
    const ssize_t written = write(STDERR_FILENO, text.data() + at, std::min<size_t>(text.size() - at, PIPE_BUF));
    if (written <= 0) return;
    at += written;
  }
}

}  // namespace jax_ring::flight
