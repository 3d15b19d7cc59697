// communicator.h: the processes of a group: in which order they carry their calls out, on which threads, and what is
// said when one of them does not come.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "shm/channel.h"
#include "shm/exchange.h"
#include "shm/group.h"

namespace jax_ring::shm {

using Memory = std::shared_ptr<unsigned char>;  // unmapped with its last owner

// One process's side of a group. The calls of a group are carried out one after the other, in an order that its first
// process chooses: that in which they become ready there. The others begin with what they have ready, so that nothing
// is lost where all agree, and turn to the first process's call where that is another one.
//
// Calls are carried out on the thread that brings them as long as the others are prompt, and then by a thread of the
// communicator's own, which sleeps while it waits: a thread of the runtime must not be held up.
class Communicator {
 public:
  // connect: maps the group's memory, of Channel::bytes(). Called once, on the communicator's thread. May throw, with
  // the reason, and has to when stop() turns true.
  using Stop = std::function<bool()>;
  using Connect = std::function<Memory(const Stop& stop)>;
  // first_round: of the channel, the same for all.
  Communicator(Group group, const Capacity& capacity, Connect connect, uint32_t first_round = 1);
  // Fails the calls that are under way.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Group& group() const { return group_; }

  // Takes a call over. If it ends before this returns, its meeting is given back, for the caller to tell its ranks;
  // otherwise the Relay tells them.
  cpu::RendezvousPtr submit(Call&& call);

 private:
  using ExchangePtr = std::unique_ptr<Exchange>;

  void run_progress_thread();
  void connect();
  void progress_calls();
  bool abort_if_peer_aborted();
  bool poll_current();
  bool is_preempted() const;
  void requeue_current();
  bool select_next();
  void wait_for_peer();
  bool wait_for_leader_call();
  cpu::RendezvousPtr finish();
  void hand_over_to_progress_thread();
  void abort(const std::string& why);
  std::string describe_missing_processes(const Exchange& exchange) const;
  std::string name_of(int process) const;
  std::string describe_peer(int process) const;
  std::string describe_call(const Call& call) const;
  void post_current_call();

  const Group group_;
  const Capacity capacity_;
  const Connect connect_;
  const bool oversubscribed_;  // more processes than processors

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool busy_ = false;                // some thread carries calls out
  bool on_progress_thread_ = false;  // ... and it is the communicator's own
  std::deque<ExchangePtr> ready_;
  std::vector<ExchangePtr> free_;
  std::optional<std::string> failure_;
  std::thread thread_;

  // Of whoever drives.
  Memory memory_;
  std::unique_ptr<Channel> channel_;
  uint32_t next_round_;
  ExchangePtr current_;
  std::optional<uint64_t> leader_call_;  // the first process's call, if it is not ready here yet
  cpu::Clock::time_point waiting_since_;
  uint64_t steps_at_wait_start_ = 0;  // of the current call when it began to wait
  bool has_posted_status_ = false;
};

}  // namespace jax_ring::shm
