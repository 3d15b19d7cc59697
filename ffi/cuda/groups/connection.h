// connection.h: one lane of a group: the mailboxes of this process's GPUs, and their peers' mailboxes as they map them.
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

// Not connected when constructed. A failed step can be repeated: completed steps stay valid, and handles that other
// processes have read refer to live memory.
class Connection {
 public:
  // group and memory must outlive it.
  Connection(const Group& group, int lane, PeerMemory& memory, std::shared_ptr<const KeyValueStore> store);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Allocates, exchanges handles with the other processes, and maps their memory. If several threads call it, one does
  // the work and the others wait; no lock is held meanwhile. On failure it throws std::runtime_error in all of them.
  void connect(double deadline_seconds);
  bool is_connected() const { return connected_.load(std::memory_order_acquire); }

  // Must be connected.
  Endpoint endpoint(int rank, uint32_t call, double deadline_seconds) const;

  // The first failure of any of this process's ranks. May be called at any time.
  std::optional<Failure> failure() const;

  // Ends the connection for good, once this process launches no more calls in it. Waits for the work of this process's
  // GPUs, then unmaps the peers' memory. Memory that other processes' GPUs may still write stays until `free_all`.
  void close() noexcept;

  // Frees the memory that `close` left. The other processes must have closed theirs.
  void free_all() noexcept;

 private:
  // The memory of a local rank, and its view of its peers.
  struct LocalRank {
    int rank = 0;
    int ordinal = 0;
    std::string handle;                     // of its mailbox, for other processes
    std::vector<unsigned char*> mailboxes;  // of all ranks
    std::vector<std::string> imported;      // by rank: the handle mapped as mailboxes[rank]
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
  std::optional<Handshake> handshake_;  // until closed: it refers to the store

  // Changed only by the connecting thread, and by close() when no thread connects.
  std::vector<LocalRank> local_;
  MulticastMemory multicast_;  // mailboxes of a group with a multicast address
  std::atomic<bool> connected_{false};
  mutable std::mutex records_mutex_;

  enum class State { idle, connecting, connected, closed };
  std::mutex mutex_;  // guards the fields below; not held during any work
  std::condition_variable changed_;
  State state_ = State::idle;
  bool should_close_ = false;
  uint64_t num_tries_ = 0;  // finished tries
  std::string error_;       // of the last try
};

}  // namespace jax_ring::gpu
