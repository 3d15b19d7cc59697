// rounds.cc: cuts a collective into pieces, and packs them into rounds.
#include "shm/exchange/rounds.h"

#include <algorithm>

#include "cpu/fold/fold_kernels.h"

namespace jax_ring::shm {
namespace {

constexpr size_t kCacheLine = 64;
// A piece has at least this much of each part. If a round lacks room for that, it has fewer parts: with shorter pieces,
// the overhead of rounds would dominate.
constexpr size_t kMinChunkBytes = 256;

// Of the largest segments. About the size of a core's private cache, so that staged values are read before they are
// evicted. Half of it costs 10% at 1 MiB; twice as much gains little.
constexpr size_t kStagingBytes = 512 << 10;
constexpr size_t kResultBytes = 256 << 10;
// A group starts at the lowest level, 1/64 of that: hundreds of groups then fit into a container's /dev/shm of 64 MiB.
constexpr int kLevels = 4;
constexpr size_t kFactor = 4;  // from one level to the next
// The most terms of a tree on one rank. A round of one part needs room for a cache line of each.
constexpr size_t kMostTerms = 48;

size_t whole_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

Capacities capacities_of(const Group& group) {
  size_t most = 0;  // the most ranks in a process
  for (int process = 0; process < group.num_processes(); ++process) {
    most = std::max(most, group.ranks_of(process).size());
  }
  // Each rank contributes some of every part: there are as many parts as ranks.
  const size_t of_rank = std::max(group.num_ranks() * kMinChunkBytes, kMostTerms * kCacheLine);
  Capacities levels(kLevels);
  size_t part = 1;
  for (int level = kLevels - 1; level >= 0; --level, part *= kFactor) {
    levels[level] = {std::max(kStagingBytes / part, most * of_rank),
                     std::max(kResultBytes / part, most * kMinChunkBytes)};
  }
  return levels;
}

Rounds::Rounds(const Group& group) : group_(group), sources_(group) {}

void Rounds::begin(const cpu::Message& message, bool one_shot, const Capacity& capacity) {
  capacity_ = capacity;
  message_ = &message;
  one_shot_ = one_shot;
  operand_ = 0;
  offset_ = 0;
  next_part_ = 0;
  publishes_results_ = false;
  if (message.counts.empty()) return;
  sources_.begin(message);
  partition_operand();
  publishes_results_ =
      std::any_of(parts_.begin(), parts_.end(), [&](const Owned& owned) { return publishes_result(owned); });
  // One size for all operands: their parts differ only in size.
  chunk_ = chunk_bytes() / cpu::element_size(message.dtype);
}

// How many sources of a part a process stages.
int Rounds::num_staged(const Owned& owned, int process) const {
  return owned.owner == process ? 0 : sources_.num_in(process, owned.part);
}

int Rounds::owner_of(const Part& part, int index) const {
  if (part.receivers.count == 1) return group_.process_of(part.receivers.first);
  if (part.sources.count == 1 || one_shot_) return kEveryone;
  return group_.process_of(index);
}

void Rounds::partition_operand() {
  const int p = group_.num_ranks(), num_results = message_->num_results;
  const size_t element_bytes = cpu::element_size(message_->dtype), count = message_->counts[operand_];
  const int num = num_parts(message_->plan, p, message_->tree, num_results);
  parts_.clear();
  for (int i = 0; i < num; ++i) {
    const Part part =
        sources_.convert(part_of(message_->plan, p, message_->tree, num_results, count, element_bytes, i));
    const int owner = owner_of(part, i);
    if (num > 1 || owner == kEveryone || part.receivers.count == 1) {
      parts_.push_back({part, owner});
      continue;
    }
    // All elements fold alike, so every process gets an equal share.
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

// As much of each part as fits a round with all of them; at least kMinChunkBytes, if a round has room for that much of
// one part.
size_t Rounds::chunk_bytes() const {
  size_t most_staged = 1, most_of_part = 1, most_results = 0;
  for (int process = 0; process < group_.num_processes(); ++process) {
    size_t staged = 0, results = 0;
    for (const Owned& owned : parts_) {
      const size_t of_part = num_staged(owned, process);
      staged += of_part;
      most_of_part = std::max(most_of_part, of_part);
      if (owned.owner == process && publishes_result(owned)) ++results;
    }
    most_staged = std::max(most_staged, staged);
    most_results = std::max(most_results, results);
  }
  size_t of_all = capacity_.staging / most_staged, of_one = capacity_.staging / most_of_part;
  if (most_results > 0) {
    of_all = std::min(of_all, capacity_.results / most_results);
    of_one = std::min(of_one, capacity_.results);
  }
  return std::max(of_all, std::min(of_one, kMinChunkBytes)) / kCacheLine * kCacheLine;
}

// Adds the next elements of a part, if the round has room.
bool Rounds::add_piece(Round& round, const Owned& owned) {
  if (offset_ >= owned.part.count) return true;
  Piece piece{operand_, owned.part, owned.owner, 0, 0};
  piece.part.from += offset_;
  piece.part.to += offset_;
  piece.part.count = std::min(chunk_, owned.part.count - offset_);
  piece.stride = whole_lines(piece.part.count * cpu::element_size(message_->dtype));
  const bool publishes = publishes_result(owned);
  if (publishes && results_[owned.owner] + piece.stride > capacity_.results) return false;
  for (int process = 0; process < group_.num_processes(); ++process) {
    if (staging_[process] + num_staged(owned, process) * piece.stride > capacity_.staging) return false;
  }
  for (int process = 0; process < group_.num_processes(); ++process) {
    round.staged_at.push_back(staging_[process]);
    staging_[process] += num_staged(owned, process) * piece.stride;
  }
  if (publishes) {
    piece.result_at = results_[owned.owner];
    results_[owned.owner] += piece.stride;
  }
  round.pieces.push_back(piece);
  return true;
}

// Adds the next elements of all parts of the operand. If the round lacks room, it returns false, and adds none or, if
// the round is empty so far, as many parts as fit.
bool Rounds::add_slice(Round& round) {
  const size_t before = round.pieces.size(), first = next_part_;
  staging_ = staging_used_;
  results_ = results_used_;
  for (; next_part_ < parts_.size(); ++next_part_) {
    if (add_piece(round, parts_[next_part_])) continue;
    if (before > 0) {
      round.pieces.resize(before);
      round.staged_at.resize(before * group_.num_processes());
      next_part_ = first;
    }
    return false;
  }
  next_part_ = 0;
  offset_ += chunk_;
  staging_used_.swap(staging_);
  results_used_.swap(results_);
  return true;
}

// Whether no process stages more than one value, of up to kTinyBytes.
bool Rounds::is_tiny(const Round& round) const {
  for (const Piece& piece : round.pieces) {
    if (piece.part.count * cpu::element_size(message_->dtype) > kTinyBytes) return false;
  }
  for (int process = 0; process < group_.num_processes(); ++process) {
    int staged = 0;
    for (const Piece& piece : round.pieces) staged += num_staged({piece.part, piece.owner}, process);
    if (staged > 1) return false;
  }
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
  }
  round.is_tiny = is_tiny(round);
  return !round.pieces.empty();
}

}  // namespace jax_ring::shm
