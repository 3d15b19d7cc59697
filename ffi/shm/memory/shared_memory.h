// shared_memory.h: the memory of a group of processes as POSIX shared memory. Its names are removed once all have
// mapped it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/memory/names.h"
#include "shm/memory/segments.h"
#include "shm/peers/failure_notes.h"

namespace jax_ring::shm {

// A group's segments. Only this user can access them. Once all processes have mapped a segment nothing is left behind,
// however they exit.
class SharedMemory final : public Segments {
 public:
  // processes: the runtime's id of each one. self: this process's index; 0 is the leader, which creates the segments.
  // deadline_seconds: how long connect() waits for the leader. host_id: the name by which the processes count as on one
  // host, for the error message; empty if they have none.
  SharedMemory(Names names, std::vector<int64_t> processes, int self, std::function<double()> deadline_seconds,
               std::string host_id = "");

  Memory connect(size_t bytes, const Stop& stop) override;
  Memory create(uint32_t number, size_t bytes) override;
  Memory open(uint32_t number, size_t bytes) override;
  void unlink(uint32_t number) override;
  std::optional<CallFailure> failure_of(int process) override;
  void clean_up(const Stop& stop) override;

 private:
  int num_processes() const { return static_cast<int>(processes_.size()); }
  Memory connect_or_fail(size_t bytes, const Stop& stop);
  [[noreturn]] void give_up_waiting(double seconds) const;
  std::string name_of_process(int process) const { return "process " + std::to_string(processes_[process]); }

  const Names names_;
  const std::string name_;  // of the first segment
  const std::vector<int64_t> processes_;
  const int self_;
  const std::function<double()> deadline_seconds_;
  const std::string host_id_;
  FailureNotes notes_;
  std::vector<std::optional<CallFailure>> failures_;  // from processes that have reported one
};

}  // namespace jax_ring::shm
