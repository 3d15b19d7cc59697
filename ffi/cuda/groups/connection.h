// connection.h: one lane of a group: the mailboxes of this process's GPUs, and those of their peers as they map them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/groups/group.h"
#include "cuda/groups/handshake.h"
#include "cuda/runtime/peer_memory.h"
#include "device/memory/endpoint.h"

namespace jax_ring::gpu {

// Not connected when constructed. A step that fails can be tried again: what has succeeded stays, and handles that
// other processes have read name memory that is alive.
class Connection {
 public:
  // group and memory must outlive it.
  Connection(const Group& group, int lane, PeerMemory& memory, std::shared_ptr<const KeyValueStore> store);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Allocates, exchanges handles with the other processes, and maps their memory. Of several threads one does it, and
  // the others wait for it; no lock is held meanwhile. Throws std::runtime_error in all of them if it fails.
  void connect(double deadline_seconds);
  bool is_connected() const { return connected_.load(std::memory_order_acquire); }

  // Must be connected.
  Endpoint endpoint(int rank, uint32_t call, double deadline_seconds) const;

  // The first failure of a rank of this process, if any. May be called at any time.
  std::optional<Failure> failure() const;

  // Ends the connection for good, when this process launches no more calls in it. Waits for the work of this process's
  // GPUs, then unmaps the peers' memory. Memory that GPUs of other processes may still write stays, until `free_all`.
  void close() noexcept;

  // Frees what `close` left. The other processes must have closed theirs.
  void free_all() noexcept;

 private:
  // What a rank of this process owns, and how it sees its peers.
  struct LocalRank {
    int rank = 0;
    int ordinal = 0;
    std::string handle;                     // of its mailbox, for other processes
    std::vector<unsigned char*> mailboxes;  // of all ranks
    std::vector<std::string> imported;      // by rank: the handle that is mapped as mailboxes[rank]
    unsigned char* counters = nullptr;      // Progress by team, then one word: whether the rank has failed
    Failure* failure = nullptr;             // guarded by records_mutex_ once connected
  };

  void try_to_connect();
  void set_up_multicast();
  void set_up(LocalRank& local, bool exports);
  void map_peers();
  void import(LocalRank& local, int peer, const std::string& handle);
  void release() noexcept;
  std::vector<int64_t> other_processes() const;
  std::vector<int> ordinals() const;

  const Group& group_;
  PeerMemory& memory_;
  Handshake handshake_;

  // Changed by the thread that connects, alone; and by close(), when no thread connects.
  std::vector<LocalRank> local_;
  MulticastMemory multicast_;  // the mailboxes of a group with a multicast address
  std::atomic<bool> connected_{false};
  mutable std::mutex records_mutex_;

  enum class State { idle, connecting, connected, closed };
  std::mutex mutex_;  // of what follows; never held while anything is done with it
  std::condition_variable changed_;
  State state_ = State::idle;
  bool should_close_ = false;
  uint64_t num_tries_ = 0;  // that have ended
  std::string error_;       // of the last one
};

}  // namespace jax_ring::gpu
