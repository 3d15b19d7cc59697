// communicators.h: the groups of processes that this process belongs to.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shm/communicator.h"
#include "shm/launch_ids.h"

namespace jax_ring::shm {

// A rank: the process that it lives in, and its mesh position.
using Member = std::pair<int64_t, int64_t>;

// The communicators of this process, made when they are first asked for, and kept, because others may still be using
// theirs.
class Communicators {
 public:
  static Communicators& instance();

  // Tells which process this is, of those that know the token. Another token means other processes: the communicators
  // are forgotten.
  void join(int64_t process, const std::string& token);
  int64_t process() const;

  // The communicator of these members, by rank. Throws std::logic_error before join().
  std::shared_ptr<Communicator> get_or_create(const std::vector<Member>& members);

  // How often this has been asked before for the key. Tells equal calls of a program apart: all processes build them in
  // the same order.
  int64_t next_index(const std::string& key);

  // The executions of the calls with this identity, in a group.
  std::shared_ptr<RunCounter> run_counter(uint64_t identity);

 private:
  mutable std::mutex mutex_;
  int64_t process_ = 0;
  std::string token_;
  std::map<std::vector<Member>, std::shared_ptr<Communicator>> by_members_;
  std::map<std::string, int64_t> next_indices_;
  std::map<uint64_t, std::shared_ptr<RunCounter>> run_counters_;
};

}  // namespace jax_ring::shm
