// exchange.h: one process's side of one collective, as a state machine that never blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/engine.h"
#include "shm/exchange/channel.h"
#include "shm/exchange/rounds.h"

namespace jax_ring::shm {

// A call after all ranks of this process have arrived.
struct Call {
  cpu::RendezvousPtr rendezvous;  // of the whole group; only the buffers of local ranks are set
  cpu::Message message;
  uint64_t id = 0;  // the same in all processes, and unique among the calls that may be pending
  bool one_shot = false;
  std::shared_ptr<const std::string> text;  // description, for error messages
};

// Advances a call as far as possible without waiting.
class Exchange {
 public:
  enum class State { done, waiting };

  explicit Exchange(const Group& group) : group_(group), rounds_(group), arrivals_(group.num_processes()) {}

  // Takes the call over. Afterwards `call` holds an earlier call's memory, for reuse.
  void begin(Call&& call);

  // Advances. `first` is the channel's round for the call's first round.
  State advance(Channel& channel, uint32_t first);

  // Starts over. Only allowed during is_waiting_for_leader().
  void restart();

  bool has_started() const { return step_ != Step::begin; }
  // Whether it waits for the group's first process, the leader, to stage the first round.
  bool is_waiting_for_leader() const { return num_rounds_ == 0 && step_ == Step::await_staged && peer_ == 0; }
  // The awaited process, and whether the current step still waits for `process`.
  int awaited_peer() const { return peer_; }
  bool is_missing(int process, const Channel& channel, uint32_t first) const;
  // Grows when all processes have arrived, not when one of them has.
  uint64_t phases_done() const { return 2 * uint64_t{num_rounds_} + (step_ == Step::await_results); }
  // Grows with every step; unchanged means no progress.
  uint64_t num_steps() const { return num_steps_; }

  // Rounds that the call took, once it is done.
  uint32_t num_rounds() const { return num_rounds_; }
  const Call& call() const { return call_; }
  // When the other processes made the call, as in arrivals.h, once it is done; by process.
  const std::vector<uint64_t>& arrivals() const { return arrivals_; }
  cpu::RendezvousPtr release() { return std::move(call_.rendezvous); }

 private:
  static constexpr int kNoLevel = -1;
  enum class Step { begin, await_growth, stage, await_staged, await_results };

  void plan();
  void begin_rounds(const Channel& channel);
  void plan_next_round(const Channel& channel);
  int level_wanted(const Channel& channel);
  bool begin_growth(Channel& channel, uint32_t number);
  bool joins_growth(Channel& channel, uint32_t number);
  void publish(const void* from, void* to, size_t count) const;
  void stage(Channel& channel, uint32_t number, const Round& round);
  void fold(Channel& channel, uint32_t number, const Round& round);
  void find_inputs(const Channel& channel, uint32_t number, const Round& round, size_t piece);
  void add_inputs(const Source& source, const Piece& piece);
  void copy_results(Channel& channel, uint32_t number, const Round& round);
  bool can_stream(size_t operand) const;
  void write_outputs(const void* result, size_t count, bool streaming) const;
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
  bool is_next_first_ = false;
  int planned_level_ = kNoLevel;  // level at which round_ is the only round of this call; else kNoLevel
  bool has_plan_ = false;         // whether it is so at the level in use
  bool next_is_staged_ = false;
  uint32_t num_rounds_ = 0;  // finished
  Step step_ = Step::begin;
  int peer_ = 0;  // all earlier processes have arrived
  uint64_t num_steps_ = 0;
  uint64_t arrival_ = 0;  // of this process, as in arrivals.h
  std::vector<uint64_t> arrivals_;
  std::vector<size_t> staged_;  // by process: the staging place of the next source of a piece
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace jax_ring::shm
