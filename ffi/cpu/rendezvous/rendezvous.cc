// rendezvous.cc: matches arrivals with rendezvous, and describes missing ranks.
#include "cpu/rendezvous/rendezvous.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/cores.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/watchdog.h"

namespace jax_ring::cpu {
namespace {

constexpr int64_t kLargestPartition = 1 << 24;  // far more than any number of devices: catches corrupt input

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

ReplicaGroups::ReplicaGroups(const std::vector<int64_t>& partitions, const std::vector<int64_t>& sizes,
                             const std::vector<bool>& is_local) {
  size_t next = 0;
  for (int64_t size : sizes) {
    members_.emplace_back(partitions.begin() + next, partitions.begin() + next + size);
    is_local_.emplace_back(size, true);
    if (!is_local.empty()) is_local_.back().assign(is_local.begin() + next, is_local.begin() + next + size);
    num_local_.push_back(static_cast<int>(std::count(is_local_.back().begin(), is_local_.back().end(), true)));
    next += size;
  }
  for (int group = 0; group < static_cast<int>(members_.size()); ++group) {
    for (int rank = 0; rank < size(group); ++rank) {
      const int64_t partition = members_[group][rank];
      if (partition < 0 || partition > kLargestPartition) {
        throw std::invalid_argument("replica groups: there is no partition " + std::to_string(partition));
      }
      places_.push_back({partition, {group, rank}});
    }
  }
  std::sort(places_.begin(), places_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
}

const ReplicaGroups::Place* ReplicaGroups::find(int64_t partition) const {
  const auto found = std::lower_bound(places_.begin(), places_.end(), partition,
                                      [](const auto& place, int64_t sought) { return place.first < sought; });
  return found != places_.end() && found->first == partition ? &found->second : nullptr;
}

ReplicaGroups::Place ReplicaGroups::place(int64_t partition) const {
  if (const Place* const found = find(partition)) return *found;
  throw std::out_of_range("partition " + std::to_string(partition) + " is in none of the call's replica groups");
}

ReplicaGroups::Place ReplicaGroups::local_place(int64_t partition) const {
  const Place found = place(partition);
  if (is_local(found.group, found.rank)) return found;
  throw std::invalid_argument("partition " + std::to_string(partition) + " is in another process");
}

std::unique_ptr<Rendezvous> RendezvousPool::acquire() {
  std::lock_guard<Mutex> lock(mutex_);
  if (free_.empty()) return std::make_unique<Rendezvous>();
  std::unique_ptr<Rendezvous> rendezvous = std::move(free_.back());
  free_.pop_back();
  return rendezvous;
}

void Rendezvous::clear() {
  num_arrived = 0;
  inputs.clear();
  outputs.clear();
  terms.clear();
  done.clear();
  waiting.clear();
  entry = {};
}

void RendezvousPool::release(std::unique_ptr<Rendezvous> rendezvous) {
  rendezvous->clear();
  std::lock_guard<Mutex> lock(mutex_);
  free_.push_back(std::move(rendezvous));
}

void ReturnToPool::operator()(Rendezvous* rendezvous) const {
  std::unique_ptr<Rendezvous> owned(rendezvous);
  if (pool != nullptr) pool->release(std::move(owned));
}

RendezvousMap::RendezvousMap(ReplicaGroups groups, std::string call)
    : groups_(std::move(groups)), call_(std::move(call)) {
  const bool have_own_cores = groups_.num_local() <= num_cores();
  for (int group = 0; group < groups_.num_groups(); ++group) {
    policies_.emplace_back(groups_.num_local(group), have_own_cores);
  }
  CompletionThreads::instance().start();
  Watchdog::instance().watch(this);
}

RendezvousMap::~RendezvousMap() {
  Watchdog::instance().unwatch(this);
  for (auto& rendezvous : open_) {
    CompletionThreads::instance().complete(
        std::move(rendezvous),
        numbered(CallFailure::of(CallFailure::Kind::released,
                                 call_ + ": the program was released while ranks were waiting in it.")));
  }
}

RendezvousPtr RendezvousMap::arrive(int64_t run_id, int64_t partition, Participant&& participant) {
  const ReplicaGroups::Place place = groups_.local_place(partition);
  const size_t num_ranks = groups_.size(place.group);
  const size_t num_operands = participant.inputs.size();
  std::unique_lock<Mutex> lock(mutex_);
  // Check under the lock: the watchdog either finds this rendezvous in the map, or recorded the failure before.
  if (const CallFailurePtr failure = Watchdog::instance().failure(run_id, this)) {
    lock.unlock();
    // Move it first: the completion may run the rank's next call, which refills the participant.
    Completion done = std::move(participant.done);
    done(failure.get());
    return nullptr;
  }
  latest_run_ = run_id;
  auto found = std::find_if(open_.begin(), open_.end(), [&](const RendezvousPtr& rendezvous) {
    return rendezvous->run_id == run_id && rendezvous->group == place.group && !rendezvous->done[place.rank];
  });
  if (found == open_.end()) {
    found = open_.insert(open_.end(), open(run_id, place, num_operands));
    // All ranks of a group may wait, or none.
    if (participant.waiting != nullptr) {
      (*found)->how_to_wait =
          policies_[place.group].next(run_id, (*found)->start_time, place.group == 0, participant.thread.may_use_pool);
    }
  }
  Rendezvous& rendezvous = **found;
  if (rendezvous.outputs.size() != num_operands * num_ranks) {
    throw std::invalid_argument(call_ + ": the ranks have different numbers of operands");
  }
  add(rendezvous, place, std::move(participant));
  if (rendezvous.num_arrived < groups_.num_local(place.group)) return nullptr;
  RendezvousPtr complete = std::move(*found);
  open_.erase(found);
  return complete;
}

RendezvousPtr RendezvousMap::arrive_alone(int64_t run_id, int64_t partition, Participant&& participant,
                                          RendezvousPtr used) {
  // No lock needed: the watchdog looks in the map, and this one is never there.
  if (const CallFailurePtr failure = Watchdog::instance().failure(run_id)) {
    Completion done = std::move(participant.done);
    done(failure.get());
    return nullptr;
  }
  const ReplicaGroups::Place place = groups_.local_place(partition);
  RendezvousPtr rendezvous = open(run_id, place, participant.inputs.size(), std::move(used));
  add(*rendezvous, place, std::move(participant));
  return rendezvous;
}

RendezvousPtr RendezvousMap::open(int64_t run_id, ReplicaGroups::Place place, size_t num_operands, RendezvousPtr used) {
  const size_t num_ranks = groups_.size(place.group);
  RendezvousPtr rendezvous = used != nullptr ? std::move(used) : RendezvousPtr(pool_->acquire().release(), {pool_});
  rendezvous->run_id = run_id;
  rendezvous->group = place.group;
  rendezvous->start_time = Clock::now();
  rendezvous->inputs.resize(2 * num_operands * num_ranks);
  rendezvous->outputs.resize(num_operands * num_ranks);
  rendezvous->done.resize(num_ranks);
  rendezvous->waiting.resize(num_ranks);
  rendezvous->how_to_wait = {};
  if (recorded_ != nullptr) {
    rendezvous->entry.enter(recorded_, memory_, place.group, nanoseconds(rendezvous->start_time));
  }
  return rendezvous;
}

// Adds a rank with its buffers.
void RendezvousMap::add(Rendezvous& rendezvous, ReplicaGroups::Place place, Participant&& participant) {
  const size_t num_ranks = rendezvous.done.size();
  for (size_t operand = 0; operand < participant.inputs.size(); ++operand) {
    const void** inputs = &rendezvous.inputs[2 * operand * num_ranks];
    inputs[place.rank] = inputs[place.rank + num_ranks] = participant.inputs[operand];
    rendezvous.outputs[operand * num_ranks + place.rank] = participant.outputs[operand];
  }
  rendezvous.done[place.rank] = std::move(participant.done);
  ++rendezvous.num_arrived;
  if (participant.waiting != nullptr) {
    if (const auto terms = policies_[place.group].terms(rendezvous.how_to_wait, participant.thread)) {
      (*participant.waiting)->start(*terms);
      rendezvous.waiting[place.rank] = *participant.waiting;
    }
  }
  if (rendezvous.entry) record_arrival(rendezvous, place.rank, groups_.num_local(place.group));
}

// Reads the clock only for the last two arrivals: the others' order is not reported.
void RendezvousMap::record_arrival(Rendezvous& rendezvous, int rank, int num_local) {
  rendezvous.entry.arrive(rank);
  if (rendezvous.num_arrived == num_local) {
    rendezvous.entry.become_ready(rank, nanoseconds(num_local == 1 ? rendezvous.start_time : Clock::now()));
  } else if (rendezvous.num_arrived == num_local - 1 && rendezvous.num_arrived > 1) {
    rendezvous.entry.note_before_last(nanoseconds(Clock::now()));
  }
}

std::vector<RendezvousPtr> RendezvousMap::remove_if(const std::function<bool(const Rendezvous&)>& predicate) {
  std::lock_guard<Mutex> lock(mutex_);
  const auto first = std::stable_partition(open_.begin(), open_.end(),
                                           [&](const RendezvousPtr& rendezvous) { return !predicate(*rendezvous); });
  std::vector<RendezvousPtr> removed(std::make_move_iterator(first), std::make_move_iterator(open_.end()));
  open_.erase(first, open_.end());
  return removed;
}

bool RendezvousMap::has_arrived(const Rendezvous& rendezvous, int64_t partition) const {
  if (!groups_.contains(partition)) return false;
  const ReplicaGroups::Place place = groups_.place(partition);
  return rendezvous.group == place.group && rendezvous.done[place.rank];
}

bool RendezvousMap::has_open(const std::function<bool(const Rendezvous&)>& predicate) {
  std::lock_guard<Mutex> lock(mutex_);
  return std::any_of(open_.begin(), open_.end(),
                     [&](const RendezvousPtr& rendezvous) { return predicate(*rendezvous); });
}

bool RendezvousMap::is_waiting(int64_t run_id, int64_t partition) {
  return has_open(
      [&](const Rendezvous& rendezvous) { return rendezvous.run_id == run_id && has_arrived(rendezvous, partition); });
}

int64_t RendezvousMap::latest_run() {
  std::lock_guard<Mutex> lock(mutex_);
  return latest_run_;
}

void RendezvousMap::add_open_runs(std::set<int64_t>& runs) {
  std::lock_guard<Mutex> lock(mutex_);
  for (const RendezvousPtr& rendezvous : open_) runs.insert(rendezvous->run_id);
}

std::string RendezvousMap::place() const {
  return call_.empty() ? "at the end of the program, without having made this call" : "in another call: " + call_;
}

CallFailure RendezvousMap::failure_of_missing_ranks(const Rendezvous& rendezvous,
                                                    std::chrono::duration<double> deadline,
                                                    const OtherPlace& other_place) const {
  CallFailure failure;
  const std::vector<int64_t>& members = groups_.members(rendezvous.group);
  std::vector<std::string> group, missing;
  std::map<std::string, std::vector<std::string>> elsewhere;  // ranks that wait in other places
  for (size_t rank = 0; rank < members.size(); ++rank) {
    group.push_back(std::to_string(members[rank]));
    if (rendezvous.done[rank] || !groups_.is_local(rendezvous.group, static_cast<int>(rank))) continue;
    if (missing.empty()) failure.rank = static_cast<int64_t>(rank);
    missing.push_back(std::to_string(rank) + " (mesh position " + group.back() + ")");
    if (const auto place = other_place(members[rank])) elsewhere[*place].push_back(std::to_string(rank));
  }
  std::ostringstream text;
  const int expected = groups_.num_local(rendezvous.group);
  text << call_ << ": " << rendezvous.num_arrived << " of " << expected << " ranks"
       << (expected < static_cast<int>(members.size()) ? " of this process" : "") << " arrived within "
       << deadline.count() << " s. Missing: rank" << (missing.size() == 1 ? " " : "s ") << join(missing)
       << " of the group of mesh positions [" << join(group) << "].";
  for (const auto& [place, ranks] : elsewhere) {
    text << (ranks.size() == 1 ? " Rank " : " Ranks ") << join(ranks) << (ranks.size() == 1 ? " waits " : " wait ")
         << place << ".";
  }
  text
      << " Every rank of a group must make the same calls: look for a branch or a loop whose condition differs between "
         "ranks (a lax.cond on lax.axis_index, say), or for an error on a missing rank: if a callback has raised there "
         "(jax.pure_callback, io_callback, jax.debug.callback), standard error has its traceback. If the missing ranks "
         "are only slow, set JAX_RING_TIMEOUT_S to more seconds.";
  failure.text = text.str();
  return failure;
}

}  // namespace jax_ring::cpu
