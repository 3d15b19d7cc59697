// checker.h: explores the executions of a few threads under relaxed memory, and reports the first that goes wrong.
//
// A scenario is a function that sets up memory and spawns threads. It is run again for each execution, on fibers of one
// thread of the host. Executions that differ only in the order of independent steps are one: what tells executions
// apart is which store each load reads, and the order of the operations that need one (locks, read-modify-writes,
// sequentially consistent accesses).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace jax_ring::model {

struct Options {
  bool exhaustive = true;             // else random executions, `max_executions` of them
  uint64_t max_executions = 1 << 20;  // an exhaustive search that takes more has failed
  uint32_t seed = 1;
  int max_preemptions = -1;  // of threads that could go on with an ordered operation; -1: any number
};

struct Outcome {
  std::string failure;      // empty: none was found
  uint64_t executions = 0;  // that ran to their end
  uint64_t redundant = 0;   // that were given up: others cover them
  uint64_t events = 0;      // loads, stores and other operations, over all executions
};

Outcome explore(const Options& options, const std::function<void()>& scenario);

// For scenarios.
void spawn(const std::string& name, std::function<void()> body);
// A thread that may still wait when the others have ended.
void spawn_daemon(const std::string& name, std::function<void()> body);
// Runs after the threads have ended.
void at_end(std::function<void()> check);
// Fails the execution.
[[noreturn]] void fail(const std::string& why);
inline void require(bool condition, const std::string& why) {
  if (!condition) fail(why);
}
void name_memory(const void* at, size_t bytes, const std::string& text);

// For the replacements of atomics and locks. Sizes are 1, 2, 4 or 8 bytes.
uint64_t load(const void* at, int bytes, std::memory_order order);
void store(void* at, int bytes, uint64_t value, std::memory_order order);
// Empty: nothing is stored, as by a comparison that fails. That publishes nothing, whatever its order.
using Change = std::function<std::optional<uint64_t>(uint64_t)>;
// Stores change(value) and returns the value.
uint64_t modify(void* at, int bytes, const Change& change, std::memory_order order);
void fence(std::memory_order order);
// Much time passes: this thread no longer reads what is overwritten by now. (Without synchronization it may, for ever,
// in the words of C++, and there only "should" not.)
void see_latest();
void plain_read(const void* at, size_t bytes);
void plain_write(const void* at, size_t bytes);

// Waits until ready(), which may load, and has no effect but on its own captures.
void await(const std::function<bool()>& ready);

// An operation whose order among the others on the same object matters. It runs as soon as it is enabled and chosen.
void ordered(const void* object, const std::string& what, const std::function<bool()>& enabled,
             const std::function<void()>& perform);
// Waits for other threads of the model, where the order in which they come does not matter.
void block(const std::string& what, const std::function<bool()>& enabled);
// One of 0 ... count-1: each is explored.
int choose(int count);
// Whether no thread can go on but by a timeout. Only then do timeouts pass.
bool is_quiet();

// Happens-before through an object of the model: what threads give to it, those who take it know.
class Baton {
 public:
  Baton();
  ~Baton();
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;
  void give();
  void take();

 private:
  struct State;
  State* state_;
};

// The running thread, from 0; -1 while a scenario sets up or checks.
int this_thread();
// Counts the executions, from 1.
uint64_t execution();

// All threads arrive, and know what the others did before.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  // Whether `mine` is true on all of them.
  bool arrive(bool mine = true);

 private:
  const int size_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  bool all_ = true, result_ = true;
  Baton batons_[2];
};

}  // namespace jax_ring::model
