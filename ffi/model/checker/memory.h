// memory.h: the model's memory: the history of each atomic, and who accessed each plain word.
//
// A store appends a message to the history of its location. A load may read any message that its thread does not know
// to be overwritten. So it sees stale values unless synchronization forbids it, as in the release-acquire fragment of
// C++. Not modeled: reads of stores that depend on them (cycles of dependencies), and stores that come earlier in
// modification order but later in time, except through the order of exploration.
#pragma once

#include <atomic>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/checker/knowledge.h"

namespace jax_ring::model {

// A read that could have seen a later message, had it been made later.
struct ReadRecord {
  int thread;
  uint32_t event;
  size_t decision;
};

struct Location {
  uintptr_t address;
  int bytes;
  std::vector<Message> messages;
  std::vector<ReadRecord> reads;
  uint32_t latest_sc = 0;  // the latest message of a sequentially consistent store
  int writer = -1;
};

class Memory {
 public:
  void clear();
  // Gives a name to a range of addresses, for reports.
  void name(const void* at, size_t bytes, const std::string& text);
  std::string describe(uintptr_t address) const;

  size_t location(const void* at, int bytes);
  Location& operator[](size_t location) { return locations_[location]; }
  size_t num_messages(size_t location) const { return locations_[location].messages.size(); }

  // The thread reads this message.
  uint64_t read(ThreadMemory& thread, size_t location, uint32_t message, std::memory_order order);
  // The thread appends a message; `previous` is the message read by a read-modify-write.
  void append(ThreadMemory& thread, int index, size_t location, uint64_t value, std::memory_order order,
              const Message* previous);
  void fence(ThreadMemory& thread, std::memory_order order);
  void see_latest(ThreadMemory& thread);

  // Plain accesses. Return a description of the data race, if there is one.
  std::string plain_read(const ThreadMemory& thread, int index, const void* at, size_t bytes);
  std::string plain_write(const ThreadMemory& thread, int index, const void* at, size_t bytes);

 private:
  // The accesses to 8 bytes.
  struct Cell {
    int writer = -1;
    uint32_t written = 0;
    Clock reads;
  };
  struct Name {
    uintptr_t begin, end;
    std::string text;
  };

  std::vector<Location> locations_;
  std::unordered_map<uintptr_t, size_t> by_address_;
  std::unordered_map<uintptr_t, Cell> cells_;
  std::vector<Name> names_;
  Knowledge sc_;  // of all sequentially consistent fences so far
};

}  // namespace jax_ring::model
