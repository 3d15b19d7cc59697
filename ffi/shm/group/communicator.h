// communicator.h: runs the calls of a group of processes: their order, their thread, and the reporting of failures.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/call_failure.h"
#include "shm/exchange/channel.h"
#include "shm/exchange/exchange.h"
#include "shm/group/group.h"
#include "shm/memory/segments.h"

namespace jax_ring::shm {

// One process's side of a group. A group's calls run one after the other, in the order in which they become ready in
// the group's first process, the leader. The other processes start with any ready call, so that nothing is lost if they
// agree, and switch to the leader's call if it differs.
//
// A call runs on the submitting thread as long as the peers are prompt. Otherwise the communicator's progress thread
// takes over and sleeps while it waits, because a thread of the runtime must not block.
class Communicator {
 public:
  // capacities: of the group's first segment, then of larger ones. segments: connected by the progress thread.
  // first_round: the channel's first round, the same in all processes.
  Communicator(Group group, Capacities capacities, std::unique_ptr<Segments> segments, uint32_t first_round = 1);
  // Fails the calls that are pending.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Group& group() const { return group_; }

  // Fails the pending calls and all later ones, here and in the other processes. These learn at once how this process
  // left: a departure, or the failure that made it leave. Returns when that is done, or after kMaxWaitToLeave if the
  // thread that runs the calls is busy that long. Does nothing in a failed group.
  static constexpr std::chrono::seconds kMaxWaitToLeave{1};
  void leave(const CallFailure& how);

  // Gives back memory that no call has used since the previous call of this function.
  void release_idle_memory();

  // Takes the call over, like Exchange::begin(). If it completes before this returns, its rendezvous is returned and
  // the caller completes the ranks. Otherwise returns null, and CompletionThreads completes them.
  cpu::RendezvousPtr submit(Call&& call);

 private:
  using ExchangePtr = std::unique_ptr<Exchange>;

  // Poll interval of a sleeping thread: nothing wakes it when a process exits.
  static constexpr std::chrono::milliseconds kPollInterval{20};
  // How long a call waits for a process without common memory before it asks for news of it.
  static constexpr std::chrono::milliseconds kPatience{200};

  void run_progress_thread();
  void connect();
  bool should_stop_connecting(cpu::Clock::time_point began);
  void progress_calls();
  bool abort_if_peer_aborted();
  bool poll_current();
  bool is_preempted() const;
  void requeue_current();
  std::deque<ExchangePtr>::iterator next_call();
  bool select_next();
  void start(ExchangePtr exchange);
  void wait_for_peer();
  void wait_for_leader_call();
  cpu::RendezvousPtr finish(std::unique_lock<std::mutex>& lock);
  void complete_current();
  void hand_over_to_progress_thread(std::unique_lock<std::mutex>& lock);
  void post_current_call();

  // In communicator_failure.cc.
  void abort(CallFailure why);
  bool is_hopeless(cpu::Clock::duration waited);
  std::vector<int> gone_processes() const;
  std::optional<CallFailure> how_left(int process) const;
  CallFailure failure_of_missing_processes(const Exchange& exchange) const;
  std::string name_of(int process) const;
  CallFailure failure_by(int process) const;
  CallFailure failure_by(int process, const CallFailure& how) const;
  CallFailure failure_by(const std::vector<int>& processes) const;
  std::string seconds_waited() const;

  const Group group_;
  const Capacities capacities_;
  const std::unique_ptr<Segments> segments_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool running_calls_ = false;       // some thread is running calls
  bool on_progress_thread_ = false;  // and it is the progress thread
  std::deque<ExchangePtr> ready_;
  std::vector<ExchangePtr> free_;
  CallFailurePtr failure_;
  std::optional<CallFailure> leaving_;  // how this process leaves, or has left
  std::condition_variable left_;
  std::thread thread_;

  // Owned by the thread that runs calls.
  Memory memory_;
  std::unique_ptr<Channel> channel_;
  uint32_t next_round_;
  uint32_t round_at_last_release_ = 0;
  ExchangePtr current_;
  std::optional<uint64_t> leader_call_;                     // the leader's call, if it is not ready here yet
  std::optional<cpu::Clock::time_point> waiting_since_;     // for the current call's current step
  uint64_t phases_at_wait_start_ = 0;                       // of the current call
  std::optional<cpu::Clock::time_point> connecting_since_;  // until the first call: it has waited as long
  std::optional<cpu::Clock::time_point> aborted_since_;     // since another process was first seen to have aborted
  bool has_posted_status_ = false;
  bool has_opened_peers_ = false;  // of the flight recorder
  bool oversubscribed_;            // more processes than cores
};

}  // namespace jax_ring::shm
