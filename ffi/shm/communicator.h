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
#include "shm/run_numbers.h"

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

  // The number of an execution of a program, the same in all processes of the group.
  uint64_t number_of_run(uint64_t program, int64_t run_id);

  // Takes a call over. If it ends before this returns, its meeting is given back, for the caller to tell its ranks;
  // otherwise the Relay tells them.
  cpu::MeetingPtr submit(Call&& call);

 private:
  using ExchangePtr = std::unique_ptr<Exchange>;

  void work();
  void connect();
  void drive();
  bool has_failed();
  bool advance_briefly();
  bool is_displaced() const;
  void give_way();
  bool take_next();
  void wait_for_peer();
  bool await_wanted();
  cpu::MeetingPtr finish();
  void hand_over();
  void fail(const std::string& why);
  std::string describe_absence(const Exchange& exchange) const;
  std::string name_of(int process) const;
  std::string describe_peer(int process) const;
  std::string describe_call(const Call& call) const;
  void say_where();

  const Group group_;
  const Capacity capacity_;
  const Connect connect_;
  const bool crowded_;  // more processes than processors

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool driving_ = false;      // some thread carries calls out
  bool handed_over_ = false;  // ... and it is the communicator's own
  RunNumbers runs_;
  std::deque<ExchangePtr> ready_;
  std::vector<ExchangePtr> spares_;
  std::optional<std::string> failure_;
  std::thread thread_;

  // Of whoever drives.
  Memory memory_;
  std::unique_ptr<Channel> channel_;
  uint32_t next_round_;
  ExchangePtr current_;
  std::optional<uint64_t> wanted_;  // the first process's call, if it is not ready here yet
  cpu::Clock::time_point waiting_since_;
  uint64_t progress_ = 0;  // of the current call when it began to wait
  bool has_spoken_ = false;
};

}  // namespace jax_ring::shm
