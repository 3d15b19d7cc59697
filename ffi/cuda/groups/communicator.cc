// communicator.cc: the members of a group, and the texts of their failures.
#include "cuda/groups/communicator.h"

#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_ring::gpu {
namespace {

const char* name_of(Step step) {
  switch (step) {
    case Step::one_shot:
      return "one-shot exchange";
    case Step::reduce_scatter:
      return "scatter to the owners of the parts";
    case Step::all_gather:
      return "gather from the owners of the parts";
    case Step::ring_receive:
      return "ring, for the next chunk";
    case Step::ring_send:
      return "ring, for a free slot";
    case Step::start:
      return "start of the call";
    case Step::count:
      break;
  }
  return "unknown step";
}

}  // namespace

Communicator::Communicator(std::vector<Member> members, int64_t process, const Capacity& capacity,
                           const std::string& name, PeerMemory& memory, std::shared_ptr<const KeyValueStore> store,
                           std::map<int64_t, int> ordinals, bool multicasts)
    : group_{std::move(members), process, capacity, name, std::move(ordinals), multicasts} {
  if (group_.members.empty() || num_ranks() > kMaxRanks) {
    throw std::runtime_error("a group has between 1 and " + std::to_string(kMaxRanks) + " GPUs, got " +
                             std::to_string(num_ranks()));
  }
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (!group_.is_local(rank)) continue;
    local_ranks_.push_back(rank);
    if (group_.ordinals.empty() || group_.ordinals.count(group_.members[rank].device) > 0) continue;
    std::string known;
    for (const auto& [id, ordinal] : group_.ordinals) known += (known.empty() ? "" : ", ") + std::to_string(id);
    throw std::runtime_error("the program was compiled for " + name_of(group_.members[rank]) + ", and this process, " +
                             std::to_string(process) + ", has the GPUs " + known);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes_[lane] = std::make_unique<Connection>(group_, lane, memory, store);
  }
}

std::optional<int> Communicator::rank_of(int ordinal) const {
  for (int rank : local_ranks_) {
    if (group_.ordinal(rank) == ordinal) return rank;
  }
  return std::nullopt;
}

void Communicator::name_call(uint32_t call, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.emplace(call, text);
}

std::optional<Failure> Communicator::failure() const {
  for (const auto& lane : lanes_) {
    if (auto failure = lane->failure()) return failure;
  }
  return std::nullopt;
}

void Communicator::retire() noexcept {
  retired_.store(true, std::memory_order_release);
  for (const auto& lane : lanes_) lane->close();
}

void Communicator::free_all() noexcept {
  for (const auto& lane : lanes_) lane->free_all();
}

CallFailurePtr Communicator::call_failure(double deadline_seconds) {
  const auto first = failure();
  if (!first) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_ != nullptr) return failed_;
  using Kind = CallFailure::Kind;
  const auto found = calls_.find(first->call);
  CallFailure known = CallFailure::of(
      Kind::deadline,
      describe(*first, found == calls_.end() ? "a call of an earlier program" : found->second, deadline_seconds));
  if (first->kind == static_cast<uint32_t>(FailureKind::mismatch)) known.kind = Kind::mismatch;
  if (first->kind == static_cast<uint32_t>(FailureKind::busy)) known.kind = Kind::overlap;
  known.rank = known.kind == Kind::overlap ? first->rank : first->peer;
  if (known.rank >= 0 && known.rank < num_ranks() && !group_.is_local(static_cast<int>(known.rank))) {
    known.process = group_.members[known.rank].process;
  }
  return failed_ = numbered(std::move(known));
}

std::string Communicator::describe(const Failure& failure, const std::string& call, double deadline_seconds) const {
  const auto member = [&](int rank) {
    return "rank " + std::to_string(rank) +
           (rank >= 0 && rank < num_ranks() ? " (" + name_of(group_.members[rank]) + ")" : "");
  };
  std::ostringstream text;
  text << call << ": ";
  if (failure.kind == static_cast<uint32_t>(FailureKind::mismatch)) {
    text << member(failure.rank) << " and " << member(failure.peer)
         << " made different calls at the same time (other shapes, another dtype, or another place in the program)";
  } else if (failure.kind == static_cast<uint32_t>(FailureKind::busy)) {
    text << member(failure.rank)
         << " started this call while another one of the group still ran in the same lane. Calls that may run at the "
            "same time need different lanes";
  } else {
    text << member(failure.rank) << " waited " << deadline_seconds << " s for " << member(failure.peer);
  }
  text << ", in step: " << name_of(static_cast<Step>(failure.step)) << ", epoch " << failure.epoch << ", team "
       << failure.cta
       << ". Every rank of a group must make the same calls in the same order: look for a branch or a loop whose "
          "condition differs between ranks, or for an error on the missing rank. If it is only slow, set "
          "JAX_RING_TIMEOUT_S to more seconds. The results of this call, and of later ones, are not valid, and the "
          "group cannot be used again: restart the program, or call jax.clear_caches() and "
          "jax_ring.runtime.forget_gpu_groups() in all processes.";
  return text.str();
}

}  // namespace jax_ring::gpu
