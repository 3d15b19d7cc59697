// arrivals.h: exchanges the times at which a group's processes made a call, for the flight recorder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recorder/flight_recorder.h"
#include "shm/exchange/channel.h"
#include "shm/group/group.h"

namespace jax_ring::shm {

// When the last rank of this process made the call, and its number; 0 if the call is not recorded. Times of two
// processes are comparable if they are less than a day apart.
inline uint64_t arrival_of(const flight::Entry& entry) {
  return entry ? static_cast<uint64_t>(entry.ready()) << 16 | static_cast<uint16_t>(entry.last()) : 0;
}

// Ends the entry of a finished call. arrivals: of all other processes, by process.
void end_entry(flight::Entry& entry, const Group& group, const std::vector<uint64_t>& arrivals);

// Opens the records of all processes of the group. They must have joined the channel.
void open_peers(const Group& group, const Channel& channel);

// The last calls of the group's processes, as a sentence for an error and as a table.
struct LastCalls {
  std::string sentence, table;
};
LastCalls last_calls_of(const Group& group);

}  // namespace jax_ring::shm
