// flight_recorder.h: this process's last calls, in memory that its peers can read after its death.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "recorder/call_statistics.h"

namespace jax_ring::flight {

enum class State : uint32_t {
  arriving,  // some ranks of this process have made the call
  ready,     // all have; it waits for other processes, or computes
  done,
  failed,
};

constexpr size_t kNumRecords = 256;
constexpr size_t kMaxCalls = 4096;
constexpr size_t kTextBytes = 256;
constexpr size_t kRanksInMask = 64;
constexpr uint64_t kBusy = ~uint64_t{0};

// One call of one group. A call writes one cache line.
struct alignas(64) Record {
  std::atomic<uint64_t> sequence;  // from 1; 0 in a new record, kBusy during a write
  std::atomic<uint64_t> id;  // the same in all processes; 0 in a group of one process, and until the call is ready
  std::atomic<int64_t> entered, ready, ended;  // nanoseconds of the steady clock, common to a host's processes
  std::atomic<uint64_t> arrived;               // one bit for each of the group's first kRanksInMask ranks
  std::atomic<uint16_t> call, group;           // indices
  std::atomic<uint32_t> members;               // a hash of the group's members; 0 in a group of one process
  std::atomic<uint32_t> last;                  // the mesh position that came last
  std::atomic<State> state;
};
static_assert(sizeof(Record) == 64);

// The memory of a process. Zeroed memory has no records. It has no name in any file system, so nothing is left behind:
// peers open it through /proc/<pid>/fd.
struct Memory {
  std::atomic<uint64_t> magic;
  std::atomic<int64_t> process;  // the runtime's id
  std::atomic<uint64_t> job;     // a hash of the job's label; 0 in a program of one process
  std::atomic<uint32_t> num_calls;
  alignas(64) std::atomic<uint64_t> next;  // the number of records taken
  Record records[kNumRecords];
  char texts[kMaxCalls][kTextBytes];  // of each call; unwritten pages take no memory
};

// A copy of a record.
struct Seen {
  uint64_t sequence = 0, id = 0;
  int64_t entered = 0, ready = 0, ended = 0;
  uint64_t arrived = 0;
  uint16_t call = 0, group = 0;
  uint32_t members = 0, last = 0;
  State state = State::arriving;
  std::string text;  // printable
};

// A process's records, oldest first.
struct Snapshot {
  int64_t process = 0;
  uint64_t job = 0;
  uint32_t user = 0;  // only where several users' are read
  std::vector<Seen> records;
};

// A group's ranks by mesh position, and their processes.
struct Members {
  std::vector<int64_t> positions, processes;
  bool is_within_process() const;
};

// A call instruction, with the common properties of its executions. Never destroyed: an execution may outlive the
// program. Equal instructions share one.
struct RecordedCall {
  uint16_t index;
  std::string text;  // what is called, and where
  std::string collective;
  std::vector<Members> groups;
  std::vector<uint32_t> hashes;  // of each group's members; 0 within a process
  std::unique_ptr<CallStatistics> statistics;
};

// One execution of a call, from the first rank's arrival on. Its rendezvous owns it; that one's lock or owner protects
// it. Empty if nothing is recorded.
class Entry {
 public:
  explicit operator bool() const { return call_ != nullptr; }
  const RecordedCall& call() const { return *call_; }
  int group() const { return group_; }

  // Reports the first rank's arrival. times: nanoseconds of the steady clock.
  void enter(RecordedCall* call, Memory* memory, int group, int64_t now) {
    call_ = call;
    group_ = group;
    entered_ = before_last_ = now;
    sequence_ = memory->next.fetch_add(1, std::memory_order_relaxed) + 1;
    record_ = &memory->records[sequence_ % kNumRecords];
    // If a thread is suspended during this write for kNumRecords other calls, it keeps the record.
    if (record_->sequence.exchange(kBusy, std::memory_order_acquire) == kBusy) return;
    // Each store publishes the ones before it: a reader of a new value sees that the sequence has changed.
    constexpr auto order = std::memory_order_release;
    record_->id.store(0, order);
    record_->entered.store(now, order);
    record_->ready.store(0, order);
    record_->ended.store(0, order);
    record_->arrived.store(0, order);
    record_->call.store(call->index, order);
    record_->group.store(static_cast<uint16_t>(group), order);
    record_->members.store(call->hashes[group], order);
    record_->state.store(State::arriving, order);
    record_->sequence.store(sequence_, order);
  }

  // Reports the arrival of the group's rank `rank`. This and the functions up to end() may touch a later call's record
  // if the thread is suspended for kNumRecords other calls at the wrong moment. Its reader then sees a call in a wrong
  // state.
  void arrive(int rank) {
    if (rank >= static_cast<int>(kRanksInMask) || !owns_record()) return;
    record_->arrived.store(record_->arrived.load(std::memory_order_relaxed) | uint64_t{1} << rank,
                           std::memory_order_release);
  }

  bool has_arrived(int rank) const { return record_->arrived.load(std::memory_order_relaxed) >> rank & 1; }

  // Reports that all ranks but one of this process have arrived.
  void note_before_last(int64_t now) { before_last_ = now; }

  // Reports that the last one has, the group's rank `rank`.
  void become_ready(int rank, int64_t now) {
    last_ = rank;
    ready_ = now;
    if (!owns_record()) return;
    record_->ready.store(now, std::memory_order_release);
    record_->last.store(static_cast<uint32_t>(position_of(rank)), std::memory_order_release);
    record_->state.store(State::ready, std::memory_order_release);
  }

  void identify(uint64_t id) {
    if (call_ != nullptr && owns_record()) record_->id.store(id, std::memory_order_release);
  }

  // The bytes of a rank's operands.
  void note_bytes(uint64_t bytes) { bytes_ = bytes; }

  // When the last rank here arrived, and which: for the peers.
  int64_t ready() const { return ready_; }
  int64_t entered() const { return entered_; }
  int last() const { return last_; }

  // The last rank of a group of several processes, the nanoseconds of its delay that are its own fault, and its
  // arrival.
  void note_last_of_all(int rank, int64_t ready, int64_t late) {
    last_ = rank;
    ready_ = ready;
    before_last_ = ready - late;
    if (owns_record()) record_->last.store(static_cast<uint32_t>(position_of(rank)), std::memory_order_release);
  }

  // Ends the entry, and adds it to the statistics. Repeated ends have no effect.
  void end(State state, int64_t now) {
    if (call_ == nullptr) return;
    uint64_t expected = sequence_;
    if (record_->sequence.compare_exchange_strong(expected, kBusy, std::memory_order_acquire)) {
      record_->ended.store(now, std::memory_order_release);
      record_->state.store(state, std::memory_order_release);
      record_->sequence.store(sequence_, std::memory_order_release);
    }
    if (state == State::done) {
      call_->statistics->add(group_, last_, ready_ - entered_, now - ready_, ready_ - before_last_, bytes_);
    } else {
      call_->statistics->add_failure();
    }
    call_ = nullptr;
  }

 private:
  // If not, later calls have taken the record.
  bool owns_record() const { return record_->sequence.load(std::memory_order_relaxed) == sequence_; }
  int64_t position_of(int rank) const { return call_->groups[group_].positions[rank]; }

  RecordedCall* call_ = nullptr;
  Record* record_ = nullptr;
  uint64_t sequence_ = 0, bytes_ = 0;
  int64_t entered_ = 0, before_last_ = 0, ready_ = 0;
  int group_ = 0, last_ = 0;
};

// One per process.
class Recorder {
 public:
  static Recorder& instance();

  // Stops recording for calls that are added afterwards; existing records stay.
  void turn_off();
  bool is_on() const { return on_; }

  // The recorded call of these groups, or null if the recorder is off.
  RecordedCall* add(std::string_view text, std::string_view collective, std::vector<Members> groups);
  Memory* memory() const { return memory_.get(); }

  // For a child that has just been forked: it gives its parent's memory back, and records in its own. Takes no lock,
  // which a thread of the parent may have held.
  void leave_parent();

  // Sets this process's number in the job with this label. Forgets the peers, which may belong to another job.
  void join(int64_t process, const std::string& label);

  // Maps a peer's memory, so that it stays readable, whatever happens to the peer. No effect if it is mapped already,
  // or if the peer cannot be found.
  void open_peer(int64_t process, int64_t pid);

  Snapshot read_own() const;
  // This process, then the peers in ascending order.
  std::vector<Snapshot> read() const;
  // Recording processes on this host, this user's or those of all that the system lets this one read, by pid.
  static std::map<int64_t, Snapshot> read_host(bool of_all_users);

  std::vector<RecordedCall*> calls() const;

  // Writes the text to standard error if it is the first since this process joined a job. Never blocks: text that does
  // not fit into a full pipe is lost.
  void print_once(const std::string& text);

 private:
  using MemoryPtr = std::shared_ptr<Memory>;
  struct Peer {
    int64_t pid;
    std::shared_ptr<const Memory> memory;
  };
  struct Found {
    std::shared_ptr<const Memory> memory;
    uint32_t owner = 0;
  };

  Recorder();
  void create();
  // The memory of a process, if its owner may be read.
  static Found open_memory_of(int64_t pid, bool of_any_user);

  int file_ = -1;  // of the memory; stays open for the life of the process: its peers find it through /proc
  MemoryPtr memory_;
  std::atomic<bool> on_{true};
  mutable std::mutex mutex_;
  std::map<int64_t, Peer> peers_;  // by process
  std::vector<std::unique_ptr<RecordedCall>> calls_;
  std::map<std::string, RecordedCall*> by_key_;
  bool has_printed_ = false;
};

// A hash of a group's members, not 0.
uint32_t hash_of(const Members& members);

}  // namespace jax_ring::flight
