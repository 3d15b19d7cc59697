// rendezvous.cc: pairing of arrivals, and the words for those who did not come.
#include "cpu/rendezvous.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cpu/call_sites.h"
#include "cpu/relay.h"
#include "cpu/watchdog.h"

namespace jax_ring::cpu {
namespace {

constexpr int64_t kLargestPartition = 1 << 24;  // far more than there are devices; a larger one is garbage

}  // namespace

ReplicaGroups::ReplicaGroups(const std::vector<int64_t>& partitions, const std::vector<int64_t>& sizes) {
  size_t next = 0;
  for (int64_t size : sizes) {
    if (size < 1 || next + size > partitions.size()) {
      throw std::invalid_argument("replica groups: the sizes do not match the number of partitions");
    }
    members_.emplace_back(partitions.begin() + next, partitions.begin() + next + size);
    next += size;
  }
  if (members_.empty() || next != partitions.size()) {
    throw std::invalid_argument("replica groups: the sizes do not match the number of partitions");
  }
  for (int group = 0; group < static_cast<int>(members_.size()); ++group) {
    for (int rank = 0; rank < size(group); ++rank) {
      const int64_t partition = members_[group][rank];
      if (partition < 0 || partition > kLargestPartition) {
        throw std::invalid_argument("replica groups: there is no partition " + std::to_string(partition));
      }
      if (partition >= static_cast<int64_t>(places_.size())) places_.resize(partition + 1, Place{-1, -1});
      if (places_[partition].group >= 0) {
        throw std::invalid_argument("replica groups: partition " + std::to_string(partition) + " is in two groups");
      }
      places_[partition] = {group, rank};
    }
  }
}

ReplicaGroups::Place ReplicaGroups::place(int64_t partition) const {
  if (partition < 0 || partition >= static_cast<int64_t>(places_.size()) || places_[partition].group < 0) {
    throw std::out_of_range("partition " + std::to_string(partition) + " is in none of the call's replica groups");
  }
  return places_[partition];
}

Rendezvous::Rendezvous(ReplicaGroups groups, std::string call) : groups_(std::move(groups)), call_(std::move(call)) {
  Watchdog::instance().watch(this);
}

Rendezvous::~Rendezvous() {
  Watchdog::instance().forget(this);
  for (auto& meeting : open_) {
    Relay::instance().tell(std::move(meeting), call_ + ": the program was released while ranks were waiting in it.");
  }
}

std::unique_ptr<Meeting> Rendezvous::arrive(int64_t run_id, int64_t partition, Participant participant) {
  const ReplicaGroups::Place place = groups_.place(partition);
  std::unique_lock<std::mutex> lock(mutex_);
  // Looked up under the lock, so that the watchdog either finds this meeting or has told us of its verdict.
  if (std::optional<std::string> failure = Watchdog::instance().failure(run_id)) {
    lock.unlock();
    participant.done(&*failure);
    return nullptr;
  }
  auto found = std::find_if(open_.begin(), open_.end(), [&](const std::unique_ptr<Meeting>& meeting) {
    return meeting->run_id == run_id && meeting->group == place.group && !meeting->participants[place.rank];
  });
  if (found == open_.end()) {
    auto meeting = std::make_unique<Meeting>();
    meeting->run_id = run_id;
    meeting->group = place.group;
    meeting->began = Clock::now();
    meeting->participants.resize(groups_.size(place.group));
    found = open_.insert(open_.end(), std::move(meeting));
  }
  Meeting& meeting = **found;
  meeting.participants[place.rank] = std::move(participant);
  if (++meeting.num_arrived < groups_.size(place.group)) return nullptr;
  std::unique_ptr<Meeting> complete = std::move(*found);
  open_.erase(found);
  return complete;
}

std::vector<std::unique_ptr<Meeting>> Rendezvous::take(const std::function<bool(const Meeting&)>& expired) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = std::stable_partition(open_.begin(), open_.end(),
                                           [&](const std::unique_ptr<Meeting>& meeting) { return !expired(*meeting); });
  std::vector<std::unique_ptr<Meeting>> taken(std::make_move_iterator(first), std::make_move_iterator(open_.end()));
  open_.erase(first, open_.end());
  return taken;
}

std::string Rendezvous::describe_absence(const Meeting& meeting, std::chrono::duration<double> deadline) const {
  const std::vector<int64_t>& members = groups_.members(meeting.group);
  std::ostringstream missing, group;
  int num_missing = 0;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    group << (rank == 0 ? "" : ", ") << members[rank];
    if (meeting.participants[rank]) continue;
    missing << (num_missing++ == 0 ? "" : ", ") << rank << " (mesh position " << members[rank] << ")";
  }
  std::ostringstream text;
  text << call_ << called_at(call_) << ": " << meeting.num_arrived << " of " << members.size()
       << " ranks arrived within " << deadline.count() << " s. Missing: rank" << (num_missing == 1 ? " " : "s ")
       << missing.str() << " of the group of mesh positions [" << group.str()
       << "]. Every rank of a group must make the same calls: look for a branch or a loop whose condition differs "
          "between ranks (a lax.cond on lax.axis_index, say), or for an error on a missing rank. If the missing ranks "
          "are only slow, set JAX_RING_TIMEOUT_S to more seconds.";
  return text.str();
}

}  // namespace jax_ring::cpu
