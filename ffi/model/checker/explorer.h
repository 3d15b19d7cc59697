// explorer.h: the state of one execution, and the tree of decisions of the search.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "model/checker/checker.h"
#include "model/checker/fiber.h"
#include "model/checker/memory.h"

namespace jax_ring::model {

// A point where executions diverge.
struct Decision {
  int count;
  int chosen = 0;
  // A read: a store that does not depend on it came later, so the read may also be made after that store.
  bool may_postpone = false;
  bool is_read = false;
};

// A thread's next step.
struct Pending {
  enum class Kind { run, read, ordered, blocked, ended } kind = Kind::run;
  const std::function<bool()>* ready = nullptr;    // of a read
  const std::function<bool()>* enabled = nullptr;  // of an ordered operation, or a block
  const std::function<void()>* perform = nullptr;
  const void* object = nullptr;
  std::string what;
};

// A load that was made within ready(), or may be made.
struct Load {
  size_t location;
  uint32_t message;
};

struct Thread {
  std::string name;
  bool is_daemon = false;
  Fiber* fiber = nullptr;
  ThreadMemory memory;
  Pending pending;
  bool is_asleep = false;  // its ordered operation is explored elsewhere
  // The locations that the read depends on, with their message counts at the last evaluation.
  std::vector<Load> watched;
  bool is_evaluated = false;
  std::vector<Load> postponed;                  // the read must see a message no older than these
  std::vector<std::pair<uint32_t, int>> stale;  // by location: the last message read, and how often
};

class Explorer {
 public:
  explicit Explorer(const Options& options) : options_(options), random_(options.seed) {}

  ~Explorer() { forget(); }

  Outcome run(const std::function<void()>& scenario);

  // The functions of checker.h.
  void spawn(const std::string& name, std::function<void()> body, bool is_daemon);
  void at_end(std::function<void()> check) { checks_.push_back(std::move(check)); }
  [[noreturn]] void fail(const std::string& why);
  uint64_t load(const void* at, int bytes, std::memory_order order);
  void store(void* at, int bytes, uint64_t value, std::memory_order order);
  uint64_t modify(void* at, int bytes, const Change& change, std::memory_order order);
  void fence(std::memory_order order);
  void plain(const void* at, size_t bytes, bool writes);
  void await(const std::function<bool()>& ready);
  void ordered(const void* object, const std::string& what, const std::function<bool()>& enabled,
               const std::function<void()>& perform);
  void block(const std::string& what, const std::function<bool()>& enabled);
  void futex_wait(const void* word, uint32_t seen);
  void futex_wake(const void* word);
  int choose(int count) { return current_ < 0 ? 0 : decide(count, false); }
  bool is_quiet() const { return is_quiet_; }
  int this_thread() const { return current_; }
  Memory& memory() { return memory_; }
  Thread* current() { return current_ < 0 ? nullptr : threads_[current_].get(); }
  void tick();

 private:
  enum class End { complete, redundant, failed };
  struct Failed {};

  End execute(const std::function<void()>& scenario);
  void forget();
  bool run_fibers();
  bool run_reads();
  bool run_ordered();
  bool is_redundant();
  bool is_over() const;
  End finish();
  bool step_randomly();
  bool advance_tree();

  void run_fiber(int thread);
  void perform(int thread);
  int decide(int count, bool is_read);
  bool needs_evaluation(const Thread& thread) const;
  std::vector<std::vector<int>> evaluate(int thread);
  bool try_script(int thread, const std::vector<int>& script, bool keep);
  uint64_t load_scripted(const void* at, int bytes, std::memory_order order);
  bool would_end_waiting(int thread);
  void note_store(size_t location, const ThreadMemory& memory, int thread);
  std::string describe_threads() const;

  struct Futex {
    std::vector<int> sleepers;
    Knowledge given;  // from the threads that woke it
    Clock cause;
  };

  const Options options_;
  std::minstd_rand random_;
  Outcome outcome_;
  std::vector<Decision> decisions_;
  size_t depth_ = 0;

  Memory memory_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::deque<Fiber> fibers_;
  std::vector<std::function<void()>> checks_;
  std::map<const void*, Futex> futexes_;
  int current_ = -1;
  bool in_fiber_ = false, is_quiet_ = false;
  int last_ordered_ = -1, preemptions_ = 0;
  std::string failure_;

  // The evaluation of ready(): the message that each load takes, and the number of messages it could have taken.
  enum class Evaluation { none, scripted, latest } evaluation_ = Evaluation::none;
  std::vector<int> script_, counts_;
  std::vector<Load> loads_;
  size_t decision_ = 0;  // of the current read
};

}  // namespace jax_ring::model
