// exchange.h: the part of one process in one collective of a group of processes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/engine.h"
#include "shm/channel.h"
#include "shm/rounds.h"

namespace jax_ring::shm {

// A call for which all ranks of this process have arrived.
struct Call {
  cpu::RendezvousPtr rendezvous;  // of all ranks of the group; the buffers of those elsewhere are not set
  cpu::Message message;
  uint64_t id = 0;  // the same in all processes, and of no other call that may be under way
  bool one_shot = false;
  std::shared_ptr<const std::string> text;  // what it is, for error messages
};

// Carries a call out as far as it can without waiting.
class Exchange {
 public:
  enum class State { done, waiting };

  Exchange(const Group& group, const Capacity& capacity) : group_(group), rounds_(group, capacity) {}

  void begin(Call&& call);

  // Goes on; the call's first round is round `first` of the channel.
  State advance(Channel& channel, uint32_t first);

  // Goes back to the beginning. Only while it waits to begin.
  void restart();

  bool has_started() const { return num_rounds_ > 0 || step_ != Step::stage; }
  // Whether no other process has been seen to make this call.
  bool no_peer_has_staged() const { return num_rounds_ == 0 && step_ == Step::await_staged && peer_ == 0; }
  // The process that it waits for; and whether `process` is one of those that it will have to wait for at this step.
  int awaited_peer() const { return peer_; }
  bool is_missing(int process, const Channel& channel, uint32_t first) const;
  // Changes whenever it gets a step further.
  uint64_t num_steps() const { return num_steps_; }

  // Rounds that it took, when it is done.
  uint32_t num_rounds() const { return num_rounds_; }
  const Call& call() const { return call_; }
  cpu::RendezvousPtr release() { return std::move(call_.rendezvous); }

 private:
  enum class Step { stage, await_staged, await_results };

  void stage(Channel& channel, uint32_t number, const Round& round) const;
  void fold(Channel& channel, uint32_t number, const Round& round);
  void copy_results(Channel& channel, uint32_t number, const Round& round);
  void write_outputs(const void* result, size_t count) const;
  bool has_arrived(int process, const Channel& channel, uint32_t number) const;
  bool have_all_arrived(const Channel& channel, uint32_t number);

  const Group& group_;
  Call call_;
  Rounds rounds_;
  cpu::FoldKernel kernel_ = nullptr, copy_ = nullptr;
  size_t element_bytes_ = 0;
  bool streaming_ = false;

  Round round_, next_;
  bool has_next_ = false;
  bool next_is_staged_ = false;
  uint32_t num_rounds_ = 0;  // that are over
  Step step_ = Step::stage;
  int peer_ = 0;  // the processes before it have come
  uint64_t num_steps_ = 0;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace jax_ring::shm
