// rounds.cc: cuts a collective into pieces, and packs them into rounds.
#include "shm/rounds.h"

#include <algorithm>

#include "cpu/fold_kernels.h"

namespace jax_ring::shm {
namespace {

constexpr size_t kCacheLine = 64;

size_t whole_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

Rounds::Rounds(const Group& group, const Capacity& capacity) : group_(group), capacity_(capacity) {}

void Rounds::begin(const cpu::Message& message, bool one_shot) {
  message_ = &message;
  one_shot_ = one_shot;
  operand_ = 0;
  offset_ = 0;
  publishes_results_ = false;
  if (message.counts.empty()) return;
  partition_operand();
  publishes_results_ =
      std::any_of(parts_.begin(), parts_.end(), [&](const Owned& owned) { return publishes_result(owned); });
  // The same for all operands, whose parts differ only in size.
  chunk_ = std::max<size_t>(1, chunk_bytes() / cpu::element_size(message.dtype));
}

int Rounds::num_sources(const Part& part, int process) const {
  if (part.sources.count == 1) return group_.process_of(part.sources.first) == process;
  return static_cast<int>(group_.ranks_of(process).size());
}

int Rounds::owner_of(const Part& part, int index) const {
  if (part.sources.count == 1) return kEveryone;
  if (part.receivers.count == 1) return group_.process_of(part.receivers.first);
  return one_shot_ ? kEveryone : index;
}

void Rounds::partition_operand() {
  const int p = group_.num_ranks();
  const size_t element_bytes = cpu::element_size(message_->dtype), count = message_->counts[operand_];
  const int num = num_parts(message_->plan, p);
  parts_.clear();
  for (int i = 0; i < num; ++i) {
    const Part part = part_of(message_->plan, p, count, element_bytes, i);
    const int owner = owner_of(part, num == 1 ? 0 : group_.process_of(i));
    if (num > 1 || owner == kEveryone || part.receivers.count == 1) {
      parts_.push_back({part, owner});
      continue;
    }
    // All elements are folded alike, so every process gets an equal share.
    const size_t line = kCacheLine / element_bytes, lines = (count + line - 1) / line;
    const size_t each = (lines + group_.num_processes() - 1) / group_.num_processes() * line;
    for (int process = 0; process < group_.num_processes(); ++process) {
      const size_t begin = std::min(count, process * each);
      Part share = part;
      share.from += begin;
      share.to += begin;
      share.count = std::min(count - begin, each);
      parts_.push_back({share, process});
    }
  }
}

size_t Rounds::chunk_bytes() const {
  size_t most_staged = 0, most_results = 0;
  for (int process = 0; process < group_.num_processes(); ++process) {
    size_t staged = 0, results = 0;
    for (const Owned& owned : parts_) {
      if (owned.owner != process) staged += num_sources(owned.part, process);
      if (owned.owner == process && publishes_result(owned)) ++results;
    }
    most_staged = std::max(most_staged, staged);
    most_results = std::max(most_results, results);
  }
  size_t bytes = capacity_.staging / std::max<size_t>(most_staged, 1);
  if (most_results > 0) bytes = std::min(bytes, capacity_.results / most_results);
  return bytes / kCacheLine * kCacheLine;
}

// Adds the next elements of all parts of the operand, if the round has room for them.
bool Rounds::add_slice(Round& round) {
  const size_t element_bytes = cpu::element_size(message_->dtype);
  const size_t before = round.pieces.size();
  staging_ = staging_used_;
  results_ = results_used_;
  for (const Owned& owned : parts_) {
    if (offset_ >= owned.part.count) continue;
    Piece piece{operand_, owned.part, owned.owner, 0, 0};
    piece.part.from += offset_;
    piece.part.to += offset_;
    piece.part.count = std::min(chunk_, owned.part.count - offset_);
    piece.stride = whole_lines(piece.part.count * element_bytes);
    for (int process = 0; process < group_.num_processes(); ++process) {
      round.staged_at.push_back(staging_[process]);
      if (owned.owner != process) staging_[process] += num_sources(owned.part, process) * piece.stride;
    }
    if (publishes_result(owned)) {
      piece.result_at = results_[owned.owner];
      results_[owned.owner] += piece.stride;
    }
    round.pieces.push_back(piece);
  }
  const auto fits = [](const std::vector<size_t>& used, size_t capacity) {
    return std::all_of(used.begin(), used.end(), [&](size_t bytes) { return bytes <= capacity; });
  };
  if (before > 0 && !(fits(staging_, capacity_.staging) && fits(results_, capacity_.results))) {
    round.pieces.resize(before);
    round.staged_at.resize(before * group_.num_processes());
    return false;
  }
  staging_used_.swap(staging_);
  results_used_.swap(results_);
  return true;
}

bool Rounds::next(Round& round) {
  round.pieces.clear();
  round.staged_at.clear();
  staging_used_.assign(group_.num_processes(), 0);
  results_used_.assign(group_.num_processes(), 0);
  while (operand_ < message_->counts.size()) {
    const bool is_complete =
        std::all_of(parts_.begin(), parts_.end(), [&](const Owned& owned) { return offset_ >= owned.part.count; });
    if (is_complete) {
      if (++operand_ == message_->counts.size()) break;
      offset_ = 0;
      partition_operand();
      continue;
    }
    if (!add_slice(round)) break;
    offset_ += chunk_;
  }
  return !round.pieces.empty();
}

}  // namespace jax_ring::shm
