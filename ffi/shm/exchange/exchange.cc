// exchange.cc: stages, folds and publishes the pieces of each round.
#include "shm/exchange/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/watch.h"
#include "cpu/fold/float_mode.h"
#include "shm/peers/arrivals.h"

namespace jax_ring::shm {
namespace {

// As in cpu/engine.cc.
constexpr size_t kStreamingBytes = 4 << 20;
constexpr size_t kCacheLine = 64;

bool are_aligned(const std::vector<void*>& outputs) {
  for (const void* output : outputs) {
    if (reinterpret_cast<uintptr_t>(output) % kCacheLine != 0) return false;
  }
  return true;
}

// Whether two calls differ only in their buffers, so that they take the same rounds. Calls with lists of their own are
// not compared.
bool are_alike(const Call& a, const Call& b) {
  const auto has_list = [](const cpu::Message& message) {
    return message.tree != nullptr || message.plan.sources != nullptr || message.plan.slices != nullptr;
  };
  const cpu::Message &first = a.message, &second = b.message;
  return first.plan.collective == second.plan.collective && first.plan.order == second.plan.order &&
         first.plan.root == second.plan.root && first.op == second.op && first.dtype == second.dtype &&
         first.counts == second.counts && first.num_results == second.num_results && a.one_shot == b.one_shot &&
         !has_list(first) && !has_list(second);
}

cpu::Outputs slices(const std::vector<void*>& buffers) { return {buffers.data(), static_cast<int>(buffers.size()), 0}; }

}  // namespace

void Exchange::begin(Call&& call) {
  const bool is_new = !are_alike(call_, call);
  if (is_new) std::swap(call_.message, call.message);
  if (call_.text != call.text) std::swap(call_.text, call.text);
  call_.rendezvous = std::move(call.rendezvous);
  call_.id = call.id & ~(uint64_t{1} << 63);  // the bits for which a channel has room
  call_.one_shot = call.one_shot;
  if (is_new) plan();
  num_rounds_ = 0;
  arrival_ = arrival_of(call_.rendezvous->entry);
  restart();
}

// Computes everything that depends on the message.
void Exchange::plan() {
  const cpu::Message& message = call_.message;
  planned_level_ = kNoLevel;
  copy_ = cpu::fold_kernels().get(Op::sum, DType::u8);
  kernel_ = cpu::fold_kernels().get(message.op, message.dtype);
  element_bytes_ = cpu::element_size(message.dtype);
  size_t written = 0;
  for (size_t count : message.counts) {
    written += message.num_results * result_count(message.plan, group_.num_ranks(), count) * element_bytes_;
  }
  streaming_ = written * group_.num_ranks() > kStreamingBytes;
}

void Exchange::restart() {
  next_is_staged_ = false;
  step_ = Step::begin;
}

void Exchange::begin_rounds(const Channel& channel) {
  is_next_first_ = true;
  has_plan_ = std::exchange(planned_level_, kNoLevel) == channel.level();
  if (has_plan_) {
    // A loop repeats one call: the last one's plan is still there, and has no successor.
    std::swap(round_, next_);
    has_next_ = true;
    return;
  }
  rounds_.begin(call_.message, call_.one_shot, channel.capacity());
  has_next_ = rounds_.next(next_);
}

void Exchange::plan_next_round(const Channel& channel) {
  has_next_ = !has_plan_ && rounds_.next(next_);
  planned_level_ = std::exchange(is_next_first_, false) && !has_next_ ? channel.level() : kNoLevel;
}

// The lowest level at which the call takes one round, or the highest level. The call began at the level in use.
int Exchange::level_wanted(const Channel& channel) {
  int level = channel.level();
  if (has_plan_ || !has_next_ || !rounds_.next(round_)) return level;
  do {
    rounds_.begin(call_.message, call_.one_shot, channel.capacity(++level));
  } while (level < channel.max_level() && rounds_.next(round_) && rounds_.next(round_));
  return level;
}

// For the leader: begins a round of growth if the call needs one and there is room, or if the group was idle.
bool Exchange::begin_growth(Channel& channel, uint32_t number) {
  if (group_.self() != 0 || !channel.may_grow()) return false;
  const int wanted = level_wanted(channel);
  if (wanted == channel.level() && !channel.must_offer()) return false;
  if (!channel.offer_growth(wanted)) return begin_rounds(channel), false;
  channel.signal_staged(number, call_.id, true);
  return true;
}

// For the others: joins a round of growth if the leader has begun one for this call. Data that this process has staged
// for the same round is void.
bool Exchange::joins_growth(Channel& channel, uint32_t number) {
  if (num_rounds_ > 0 || group_.self() == 0 || !channel.has_staged(0, number, call_.id, true)) return false;
  channel.accept_growth();
  channel.signal_staged(number, call_.id, true);
  return true;
}

bool Exchange::has_arrived(int process, const Channel& channel, uint32_t number) const {
  if (process == group_.self()) return true;
  if (step_ == Step::await_results) return channel.has_results(process, number);
  return channel.has_staged(process, number, call_.id, step_ == Step::await_growth);
}

bool Exchange::is_missing(int process, const Channel& channel, uint32_t first) const {
  return process >= peer_ && !has_arrived(process, channel, first + num_rounds_);
}

bool Exchange::have_all_arrived(const Channel& channel, uint32_t number) {
  for (; peer_ < group_.num_processes(); ++peer_, ++num_steps_) {
    if (!has_arrived(peer_, channel, number)) return false;
    // Read it now, while its line is here: later the peer may be writing there again.
    if (step_ == Step::await_staged) arrivals_[peer_] = channel.arrival_of(peer_, number);
  }
  return true;
}

Exchange::State Exchange::advance(Channel& channel, uint32_t first) {
  for (;;) {
    const uint32_t number = first + num_rounds_;
    switch (step_) {
      case Step::begin:
        peer_ = 0;
        begin_rounds(channel);
        // Check later whether the others join the leader's round of growth: looking now would wait for their line, and
        // delay what they wait for.
        step_ = begin_growth(channel, number) ? Step::await_growth : Step::stage;
        break;
      case Step::await_growth:
        if (!have_all_arrived(channel, number)) return State::waiting;
        channel.finish_growth();
        ++num_rounds_;
        begin_rounds(channel);
        step_ = Step::stage;
        break;
      case Step::stage:
        if (!has_next_) return State::done;
        std::swap(round_, next_);
        if (!std::exchange(next_is_staged_, false)) {
          stage(channel, number, round_);
          // Write it only now, with the signal: the peers poll this line.
          channel.skip_results(number - 1);
          channel.signal_staged(number, call_.id);
        }
        plan_next_round(channel);
        peer_ = 0;
        step_ = Step::await_staged;
        break;
      case Step::await_staged:
        if (peer_ == 0 && joins_growth(channel, number)) {
          step_ = Step::await_growth;
          break;
        }
        if (!have_all_arrived(channel, number)) return State::waiting;
        if (rounds_.publishes_results() && has_next_) {
          // Signal now, so that the peers find it as soon as they finish this round.
          stage(channel, number + 1, next_);
          channel.signal_staged(number + 1, call_.id);
          next_is_staged_ = true;
        }
        fold(channel, number, round_);
        if (rounds_.publishes_results()) {
          channel.signal_results(number);
          peer_ = 0;
          step_ = Step::await_results;
          break;
        }
        ++num_rounds_;
        step_ = Step::stage;
        break;
      case Step::await_results:
        if (!have_all_arrived(channel, number)) return State::waiting;
        copy_results(channel, number, round_);
        ++num_rounds_;
        step_ = Step::stage;
        break;
    }
  }
}

// Adds the places of the values of a source in this process.
void Exchange::add_inputs(const Source& source, const Piece& piece) {
  const cpu::Message& message = call_.message;
  const void* const* operands = &call_.rendezvous->inputs[piece.operand * 2 * group_.num_ranks()];
  const auto add = [&](int rank, size_t slot) {
    const size_t from = slot * message.counts[piece.operand] + piece.part.from;
    inputs_.push_back(static_cast<const char*>(operands[rank]) + from * element_bytes_);
  };
  if (!folds_along_tree(message.plan)) return add(source.first, 0);
  for (int i = 0; i < source.count; ++i) {
    const TreeTerm& term = message.tree->terms()[source.first + i];
    add(term.member, term.slot);
  }
}

// Copies the inputs of a round to where the other processes find them. Their caches still hold the lines of an earlier
// round, so each store of a fold would wait for one of them: several times as long as a copy, if cores share no cache.
void Exchange::publish(const void* from, void* to, size_t count) const {
  watch_write(to, count * element_bytes_);
  std::memcpy(to, from, count * element_bytes_);
}

void Exchange::stage(Channel& channel, uint32_t number, const Round& round) {
  const cpu::ScopedFloatMode exact(cpu::FloatMode::ieee());
  unsigned char* const staging = channel.staging(group_.self(), number, round.is_tiny);
  for (size_t i = 0; i < round.pieces.size(); ++i) {
    const Piece& piece = round.pieces[i];
    if (piece.owner == group_.self()) continue;
    void* to = staging + round.staged(i, group_.self(), group_.num_processes());
    for (int s = 0; s < piece.part.sources.count; ++s) {
      const Source& source = rounds_.sources()[piece.part.sources.first + s];
      if (source.process != group_.self()) continue;
      inputs_.clear();
      add_inputs(source, piece);
      if (source.count == 1) {
        publish(inputs_[0], to, piece.part.count);
      } else {
        kernel_({inputs_.data(), source.count, 0, rounds_.sources().steps_of(source)}, {&to, 1, 0}, piece.part.count,
                false);
      }
      to = static_cast<char*>(to) + piece.stride;
    }
  }
  // Last: it is in the line of the signals, which the peers are polling.
  channel.post_arrival(number, arrival_);
}

// Whether streaming stores to this operand's outputs are possible and worthwhile. They do not pay where results
// overwrite operands: these have just been read, so users of the results find them in the cache.
bool Exchange::can_stream(size_t operand) const {
  if (!streaming_ || !are_aligned(outputs_)) return false;
  const int p = group_.num_ranks();
  const auto is_in_place = [&](int rank) {
    return call_.rendezvous->inputs[operand * 2 * p + rank] == call_.rendezvous->outputs[operand * p + rank];
  };
  const std::vector<int>& ranks = group_.ranks_of(group_.self());
  return std::none_of(ranks.begin(), ranks.end(), is_in_place);
}

// Copies a result to the outputs.
void Exchange::write_outputs(const void* result, size_t count, bool streaming) const {
  copy_({&result, 1, 0}, slices(outputs_), count * element_bytes_, streaming);
}

// Finds the inputs for the fold of a piece: local ranks' values in their operands, the others where they are staged.
void Exchange::find_inputs(const Channel& channel, uint32_t number, const Round& round, size_t piece) {
  const Part& part = round.pieces[piece].part;
  inputs_.clear();
  staged_.clear();
  for (int process = 0; process < group_.num_processes(); ++process) {
    staged_.push_back(round.staged(piece, process, group_.num_processes()));
  }
  for (int s = 0; s < part.sources.count; ++s) {
    const Source& source = rounds_.sources()[part.sources.first + s];
    if (source.process == group_.self()) {
      add_inputs(source, round.pieces[piece]);
    } else {
      inputs_.push_back(channel.staging(source.process, number, round.is_tiny) + staged_[source.process]);
      staged_[source.process] += round.pieces[piece].stride;
    }
  }
}

void Exchange::fold(Channel& channel, uint32_t number, const Round& round) {
  const cpu::ScopedFloatMode exact(cpu::FloatMode::ieee());
  const int p = group_.num_ranks();
  for (size_t i = 0; i < round.pieces.size(); ++i) {
    const Piece& piece = round.pieces[i];
    const Part& part = piece.part;
    void* const* outputs = &call_.rendezvous->outputs[piece.operand * p];
    const auto output = [&](int rank) { return static_cast<char*>(outputs[rank]) + part.to * element_bytes_; };
    if (piece.owner == group_.self() || piece.owner == kEveryone) {
      find_inputs(channel, number, round, i);
      const cpu::Inputs sources{inputs_.data(), static_cast<int>(inputs_.size()), 0, rounds_.sources().steps_of(part)};
      outputs_.clear();
      for (int r = part.receivers.first; r < part.receivers.first + part.receivers.count; ++r) {
        if (group_.is_local(r)) outputs_.push_back(output(r));
      }
      const bool publishes = piece.owner != kEveryone && part.receivers.count > 1;
      // Published results are read back at once.
      const bool streaming = !publishes && can_stream(piece.operand);
      if (!outputs_.empty() && !inputs_.empty()) kernel_(sources, slices(outputs_), part.count, streaming);
      if (publishes) publish(outputs_[0], channel.results(group_.self(), number) + piece.result_at, part.count);
    }
    if (!part.zeros_elsewhere && part.sources.count > 0) continue;
    for (int rank : group_.ranks_of(group_.self())) {
      const bool receives = rank >= part.receivers.first && rank < part.receivers.first + part.receivers.count;
      if (receives == (part.sources.count > 0)) continue;
      std::memset(output(rank), 0, part.count * element_bytes_);
    }
  }
}

void Exchange::copy_results(Channel& channel, uint32_t number, const Round& round) {
  for (const Piece& piece : round.pieces) {
    if (piece.owner == group_.self() || piece.owner == kEveryone) continue;
    const void* result = channel.results(piece.owner, number) + piece.result_at;
    outputs_.clear();
    void* const* outputs = &call_.rendezvous->outputs[piece.operand * group_.num_ranks()];
    for (int rank : group_.ranks_of(group_.self())) {
      outputs_.push_back(static_cast<char*>(outputs[rank]) + piece.part.to * element_bytes_);
    }
    write_outputs(result, piece.part.count, can_stream(piece.operand));
  }
}

}  // namespace jax_ring::shm
