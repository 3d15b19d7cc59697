// flight_table.h: the last calls of several processes, or of the ranks of one, side by side.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "recorder/flight_recorder.h"

namespace jax_ring::flight {

// The last ten calls, the latest last, with the state of each process; 80 columns wide. If there are several processes,
// completed calls within one of them are left out.
//
// now: nanoseconds of the steady clock.
std::string table_of_processes(const std::vector<Snapshot>& snapshots, int64_t now);

// The same by mesh position of this process, for calls whose groups are within the process.
std::string table_of_ranks();

// A sentence about the last call of each process, for errors: " Last calls: ...". Empty if nothing is known.
std::string last_calls_of_processes(const std::vector<Snapshot>& snapshots, int64_t now);

// The same for the ranks of a group within this process that have not arrived in `entry`, and do not wait elsewhere,
// which the error says already.
std::string last_calls_of_missing_ranks(const Entry& entry);

// Of this process and its peers: by process if there are several, else by rank.
std::string table_of_everything();

// The live processes of this user on this host, a table for each job, and which process of it has which pid.
std::vector<std::pair<std::string, std::string>> tables_of_host();

int64_t nanoseconds_now();

}  // namespace jax_ring::flight
