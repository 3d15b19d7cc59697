// communicators.h: the communicators of this process, one per group of processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/group/communicator.h"
#include "shm/group/launch_ids.h"

namespace jax_ring::shm {

// A rank: its process and its mesh position.
using Member = std::pair<int64_t, int64_t>;

// Communicators are created on first use and kept, because other processes may still be using theirs.
class Communicators {
 public:
  static Communicators& instance();

  // Sets this process's id among the processes with the same key. label, key: for the names of their shared memory, see
  // Names. A new key means a new set of processes: the old communicators are dropped. Throws std::invalid_argument
  // unless the key has SipHash::kKeyBytes.
  void join(int64_t process, const std::string& label, const std::string& key);
  int64_t process() const;

  // Aborts all groups, including future ones: see Communicator::leave(). For a process that makes no more calls.
  void abort(const CallFailure& how);

  // Leaves all groups and forgets the key, the counters, and the failures of executions, so that join() starts afresh
  // in this process. Earlier compiled programs fail.
  void reset();

  // Whether this process has had a group since join().
  bool has_groups() const;

  // The communicator of these members, by rank. Throws std::logic_error before join().
  std::shared_ptr<Communicator> get_or_create(const std::vector<Member>& members);

  // Gives back memory unused since the last time. A thread of this class calls it every kIdleTime.
  static constexpr std::chrono::seconds kIdleTime{30};
  void release_idle_memory();

  // How often this was called for the key since no program was being built. Distinguishes equal calls of a program,
  // which all processes build in the same order, but not equally often.
  int64_t next_index(const std::string& key);
  // change: 1 when a build begins, -1 when it has ended.
  void count_builds(int change);

  // The run counter of the calls with this identity, in one group.
  std::shared_ptr<RunCounter> run_counter(uint64_t identity);

 private:
  void watch_idle_memory();

  std::vector<std::shared_ptr<Communicator>> all() const;

  mutable std::mutex mutex_;
  int64_t process_ = 0;
  std::string label_, key_;             // the key is empty before join()
  std::optional<CallFailure> aborted_;  // how
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> by_members_;
  bool watches_idle_memory_ = false;
  std::map<std::string, int64_t> next_indices_;
  int num_builds_ = 0;  // that have not ended
  std::map<uint64_t, std::shared_ptr<RunCounter>> run_counters_;
};

}  // namespace jax_ring::shm
