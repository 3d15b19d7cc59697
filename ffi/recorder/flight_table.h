// flight_table.h: the last calls of several processes, or of the ranks of one, side by side.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "recorder/flight_recorder.h"

namespace jax_ring::flight {

// The last ten calls, latest last, with each process's state; 80 columns wide. If there are several processes,
// completed calls within one of them are omitted.
//
// now: nanoseconds of the steady clock.
std::string table_of_processes(const std::vector<Snapshot>& snapshots, int64_t now);

// The last ten calls by mesh position, for this process alone.
std::string table_of_ranks();

// A sentence about each process's last call, for errors: " Last calls: ...". Empty if nothing is known.
std::string last_calls_of_processes(const std::vector<Snapshot>& snapshots, int64_t now);

// Such a sentence about ranks of a group within this process that neither have arrived in `entry` nor wait elsewhere:
// the error says that already.
std::string last_calls_of_missing_ranks(const Entry& entry);

// Of this process and its peers: by process if there are several, else by rank.
std::string table_of_everything();

// Live processes on this host, this user's or all that can be read: (user, the pid of each process, table) of each job.
std::vector<std::tuple<int64_t, std::string, std::string>> tables_of_host(bool of_all_users);

int64_t nanoseconds_now();

}  // namespace jax_ring::flight
