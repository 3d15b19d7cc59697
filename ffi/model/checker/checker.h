// checker.h: explores the executions of a few threads under relaxed memory, and reports the first faulty one.
//
// A scenario is a function that sets up memory and spawns threads. It runs once per execution, on fibers of one host
// thread. Executions that differ only in the order of independent steps count as one: only two things tell executions
// apart, which store each load reads, and the order of the operations that need one (locks, read-modify-writes,
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
  uint64_t max_executions = 1 << 20;  // an exhaustive search that needs more fails
  uint32_t seed = 1;
  int max_preemptions = -1;  // of threads that could go on with an ordered operation; -1: any number
};

struct Outcome {
  std::string failure;      // empty: none
  uint64_t executions = 0;  // completed
  uint64_t redundant = 0;   // abandoned, because others cover them
  uint64_t events = 0;      // loads, stores and other operations, over all executions
};

Outcome explore(const Options& options, const std::function<void()>& scenario);

// For scenarios.
void spawn(const std::string& name, std::function<void()> body);
// A thread that may still be waiting when the others have ended.
void spawn_daemon(const std::string& name, std::function<void()> body);
// Runs after the threads have ended.
void at_end(std::function<void()> check);
[[noreturn]] void fail(const std::string& why);
inline void require(bool condition, const std::string& why) {
  if (!condition) fail(why);
}
void name_memory(const void* at, size_t bytes, const std::string& text);

// For the replacements of atomics and locks. Sizes are 1, 2, 4 or 8 bytes.
uint64_t load(const void* at, int bytes, std::memory_order order);
void store(void* at, int bytes, uint64_t value, std::memory_order order);
// Empty: stores nothing, like a failed comparison. That publishes nothing, whatever its order.
using Change = std::function<std::optional<uint64_t>(uint64_t)>;
// Stores change(value) and returns the value.
uint64_t modify(void* at, int bytes, const Change& change, std::memory_order order);
void fence(std::memory_order order);
// Much time passes: this thread no longer reads values that are overwritten by now. (Without synchronization, C++ lets
// it read them forever; it "should" not.)
void see_latest();
void plain_read(const void* at, size_t bytes);
void plain_write(const void* at, size_t bytes);

// Waits until ready(), which may load, and affects nothing but its own captures.
void await(const std::function<bool()>& ready);

// An operation whose order among others on the same object matters. It runs once it is enabled and chosen.
void ordered(const void* object, const std::string& what, const std::function<bool()>& enabled,
             const std::function<void()>& perform);
// Waits for other threads of the model, in any order.
void block(const std::string& what, const std::function<bool()>& enabled);
// One of 0 ... count-1: each is explored.
int choose(int count);
// Whether no thread can go on except by a timeout. Only then do timeouts pass.
bool is_quiet();

// Happens-before through an object of the model: threads that take from it know what others gave to it.
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

// A barrier: all threads arrive, and know what the others did before.
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
