// communicator.cc: allocates mailboxes, exchanges their handles, and describes failures.
#include "cuda/communicator.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace jax_ring::gpu {
namespace {

size_t progress_bytes(const Capacity& capacity) { return kLanes * capacity.num_ctas * sizeof(Progress); }

std::string name_of(const Member& member) {
  return "GPU " + std::to_string(member.device) + " of process " + std::to_string(member.process);
}

const char* name_of(Step step) {
  switch (step) {
    case Step::one_shot:
      return "one-shot exchange";
    case Step::reduce_scatter:
      return "reduce-scatter";
    case Step::all_gather:
      return "all-gather";
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
                           const std::string& name, PeerMemory& memory, const KeyValueStore& store)
    : members_(std::move(members)), process_(process), capacity_(capacity), memory_(memory) {
  if (members_.empty() || num_ranks() > kMaxRanks) {
    throw std::runtime_error("a group has between 1 and " + std::to_string(kMaxRanks) + " GPUs, got " +
                             std::to_string(members_.size()));
  }
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (members_[rank].process == process_) local_ranks_.push_back(rank);
  }
  try {
    connect(name, store);
  } catch (...) {
    release();
    throw;
  }
}

Communicator::~Communicator() { release(); }

void Communicator::connect(const std::string& name, const KeyValueStore& store) {
  const auto key = [&](int rank) { return name + "/mailbox/" + std::to_string(rank); };
  const bool alone = static_cast<int>(local_ranks_.size()) == num_ranks();
  for (int rank : local_ranks_) {
    const int device = static_cast<int>(members_[rank].device);
    LocalRank& local = local_[rank];
    local.mailboxes.resize(num_ranks());
    memory_.warm_up(device);
    local.mailboxes[rank] = static_cast<unsigned char*>(memory_.allocate(device, kLanes * capacity_.bytes()));
    local.counters =
        static_cast<unsigned char*>(memory_.allocate(device, progress_bytes(capacity_) + sizeof(uint32_t)));
    local.failure = static_cast<Failure*>(memory_.allocate_on_host(sizeof(Failure)));
    if (!alone) store.publish(key(rank), memory_.export_handle(device, local.mailboxes[rank]));
  }
  for (int rank : local_ranks_) {
    const int device = static_cast<int>(members_[rank].device);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer == rank) continue;
      const Member& other = members_[peer];
      if (other.process != process_) {
        local_[rank].mailboxes[peer] =
            static_cast<unsigned char*>(memory_.import_handle(device, store.fetch(key(peer))));
        continue;
      }
      if (!memory_.can_access(device, static_cast<int>(other.device))) {
        throw std::runtime_error(name_of(members_[rank]) + " has no peer access to " + name_of(other));
      }
      memory_.enable_access(device, static_cast<int>(other.device));
      local_[rank].mailboxes[peer] = local_[peer].mailboxes[peer];
    }
  }
}

void Communicator::release() noexcept {
  for (auto& [rank, local] : local_) {
    const int device = static_cast<int>(members_[rank].device);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      unsigned char* mailbox = local.mailboxes[peer];
      if (mailbox == nullptr || members_[peer].process == process_) continue;
      memory_.close_handle(device, mailbox);
    }
    if (local.mailboxes[rank] != nullptr) memory_.release(device, local.mailboxes[rank]);
    if (local.counters != nullptr) memory_.release(device, local.counters);
    if (local.failure != nullptr) memory_.release_on_host(local.failure);
  }
  local_.clear();
}

std::optional<int> Communicator::rank_of(int64_t device) const {
  for (int rank : local_ranks_) {
    if (members_[rank].device == device) return rank;
  }
  return std::nullopt;
}

Endpoint Communicator::endpoint(int rank, int lane, uint32_t call, double deadline_seconds) const {
  const LocalRank& local = local_.at(rank);
  Endpoint self{};
  self.capacity = capacity_;
  self.rank = rank;
  self.call = call;
  for (int peer = 0; peer < num_ranks(); ++peer) self.mailbox[peer] = local.mailboxes[peer] + lane * capacity_.bytes();
  self.progress = reinterpret_cast<Progress*>(local.counters) + lane * capacity_.num_ctas;
  self.failed = reinterpret_cast<uint32_t*>(local.counters + progress_bytes(capacity_));
  self.failure = local.failure;
  self.deadline_ns = static_cast<uint64_t>(deadline_seconds * 1e9);
  return self;
}

std::optional<Failure> Communicator::failure() const {
  for (const auto& [rank, local] : local_) {
    // Written by the GPU, as the last field of the record.
    const uint32_t kind = __atomic_load_n(&local.failure->kind, __ATOMIC_ACQUIRE);
    if (kind != static_cast<uint32_t>(FailureKind::none)) return *local.failure;
  }
  return std::nullopt;
}

std::string Communicator::describe(const Failure& failure, const std::string& call, double deadline_seconds) const {
  const auto member = [&](int rank) {
    return "rank " + std::to_string(rank) +
           (rank >= 0 && rank < num_ranks() ? " (" + name_of(members_[rank]) + ")" : "");
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
