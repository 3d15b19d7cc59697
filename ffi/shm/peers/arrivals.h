// arrivals.h: tells the processes of a group when each of them made a call, for the flight recorder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recorder/flight_recorder.h"
#include "shm/exchange/channel.h"
#include "shm/group/group.h"

namespace jax_ring::shm {

// When the last rank of this process made the call, and which it was; 0 if the call is not recorded. The times of two
// processes may be compared if they are less than a day apart.
inline uint64_t arrival_of(const flight::Entry& entry) {
  return entry ? static_cast<uint64_t>(entry.ready()) << 16 | static_cast<uint16_t>(entry.last()) : 0;
}

// Ends the entry of a call that is done. arrivals: of all processes but this one, by process.
void end_entry(flight::Entry& entry, const Group& group, const std::vector<uint64_t>& arrivals);

// Opens the records of all processes of the group, which must have joined the channel.
void open_peers(const Group& group, const Channel& channel);

// What the processes of a group did last, as a sentence for an error and as a table.
struct LastCalls {
  std::string sentence, table;
};
LastCalls last_calls_of(const Group& group);

}  // namespace jax_ring::shm
