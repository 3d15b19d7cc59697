// arrivals.cc: finds the process that came last.
#include "shm/peers/arrivals.h"

#include <algorithm>
#include <set>
#include <vector>

#include "recorder/flight_table.h"

namespace jax_ring::shm {
namespace {

constexpr int kRankBits = 16;

// Nanoseconds by which one arrival is later than another.
int64_t difference(uint64_t later, uint64_t earlier) {
  constexpr uint64_t kRank = (1 << kRankBits) - 1;
  return static_cast<int64_t>((later & ~kRank) - (earlier & ~kRank)) >> kRankBits;
}

int rank_of(uint64_t arrival) { return static_cast<int>(arrival & ((1 << kRankBits) - 1)); }

}  // namespace

void end_entry(flight::Entry& entry, const Group& group, const std::vector<uint64_t>& arrivals) {
  if (!entry) return;
  const uint64_t own = arrival_of(entry);
  uint64_t last = own, before_last = 0;  // 0: none
  for (int process = 0; process < group.num_processes(); ++process) {
    if (process == group.self()) continue;
    uint64_t other = arrivals[process];
    if (other == 0) continue;                           // it does not record
    if (rank_of(other) >= group.num_ranks()) continue;  // the other process may have written anything
    if (difference(other, last) > 0) std::swap(other, last);
    if (before_last == 0 || difference(other, before_last) > 0) before_last = other;
  }
  const int64_t ready = entry.ready() + difference(last, own);
  if (before_last != 0) {
    entry.note_last_of_all(rank_of(last), ready, difference(last, before_last));
  }
  entry.end(flight::State::done, flight::nanoseconds_now());
}

void open_peers(const Group& group, const Channel& channel) {
  for (int process = 0; process < group.num_processes(); ++process) {
    if (process == group.self()) continue;
    flight::Recorder::instance().open_peer(group.process_id(process), channel.pid_of(process));
  }
}

LastCalls last_calls_of(const Group& group) {
  std::set<int64_t> members;
  for (int process = 0; process < group.num_processes(); ++process) members.insert(group.process_id(process));
  std::vector<flight::Snapshot> snapshots = flight::Recorder::instance().read();
  snapshots.erase(
      std::remove_if(snapshots.begin(), snapshots.end(),
                     [&](const flight::Snapshot& snapshot) { return members.count(snapshot.process) == 0; }),
      snapshots.end());
  const int64_t now = flight::nanoseconds_now();
  return {flight::last_calls_of_processes(snapshots, now), flight::table_of_processes(snapshots, now)};
}

}  // namespace jax_ring::shm
