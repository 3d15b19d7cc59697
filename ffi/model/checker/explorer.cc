// explorer.cc: the search over decisions, and the steps of threads between them.
#include "model/checker/explorer.h"

#include <sstream>

namespace jax_ring::model {
namespace {

// How often in a row a thread may read the same overwritten message of a location.
constexpr int kStaleReads = 2;
// The events of an execution. No scenario needs nearly as many.
constexpr int kMaxSteps = 20000;
// In random executions, one in this many reads is postponed.
constexpr unsigned kPostponedReads = 8;

}  // namespace

Outcome Explorer::run(const std::function<void()>& scenario) {
  for (;;) {
    switch (execute(scenario)) {
      case End::failed: {
        std::ostringstream text;
        text << failure_ << "\n  in execution " << outcome_.executions + 1 << "\n" << describe_threads();
        outcome_.failure = text.str();
        return outcome_;
      }
      case End::complete:
        ++outcome_.executions;
        break;
      case End::redundant:
        ++outcome_.redundant;
        break;
    }
    const uint64_t tried = outcome_.executions + outcome_.redundant;
    if (options_.exhaustive) {
      if (!advance_tree()) return outcome_;
      if (tried < options_.max_executions) continue;
      outcome_.failure = "the search is not complete after " + std::to_string(tried) + " executions";
      return outcome_;
    }
    if (tried >= options_.max_executions) return outcome_;
  }
}

// Moves on to the next leaf of the tree. Returns false if there is none.
bool Explorer::advance_tree() {
  while (!decisions_.empty()) {
    Decision& last = decisions_.back();
    const bool postpones = last.is_read && last.may_postpone;
    if (last.chosen + 1 < last.count + (postpones ? 1 : 0)) {
      ++last.chosen;
      return true;
    }
    decisions_.pop_back();
  }
  return false;
}

int Explorer::decide(int count, bool is_read) {
  if (!options_.exhaustive) return static_cast<int>(random_() % count);
  if (depth_ == decisions_.size()) {
    Decision decision{count};
    decision.is_read = is_read;
    decisions_.push_back(decision);
  }
  const Decision& decision = decisions_[depth_++];
  if (decision.count != count || decision.is_read != is_read) {
    fail("the scenario is not deterministic: a decision between " + std::to_string(decision.count) +
         " became one between " + std::to_string(count));
  }
  return decision.chosen;
}

// Ends an execution: destroys its captures before the next one begins.
void Explorer::forget() {
  current_ = -1;
  threads_.clear();
  checks_.clear();
  threads_.clear();  // a destructor may have spawned threads that never run
  for (Fiber& fiber : fibers_) fiber.reset({});
  memory_.clear();
  futexes_.clear();
}

Explorer::End Explorer::execute(const std::function<void()>& scenario) {
  forget();
  last_ordered_ = -1;
  depth_ = 0;
  preemptions_ = 0;
  is_quiet_ = in_fiber_ = false;
  evaluation_ = Evaluation::none;
  failure_.clear();
  try {
    scenario();
    for (int step = 0;; ++step) {
      if (step == kMaxSteps) fail("livelock: no end after " + std::to_string(step) + " steps");
      if (options_.exhaustive ? run_fibers() || run_reads() || run_ordered() : step_randomly()) continue;
      if (is_redundant()) return End::redundant;
      if (is_quiet_ || is_over()) return finish();
      is_quiet_ = true;  // lets a timeout pass
    }
  } catch (const Failed&) {
    evaluation_ = Evaluation::none;
    return End::failed;
  }
}

// Runs threads until each one's next step needs a decision, or is impossible. Returns whether any ran.
bool Explorer::run_fibers() {
  bool ran = false;
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    const Pending& pending = threads_[i]->pending;
    const bool can_run =
        pending.kind == Pending::Kind::run || (pending.kind == Pending::Kind::blocked && (*pending.enabled)());
    if (!can_run) continue;
    run_fiber(i);
    ran = true;
  }
  return ran;
}

void Explorer::run_fiber(int index) {
  Thread& thread = *threads_[index];
  thread.pending.kind = Pending::Kind::run;
  current_ = index;
  in_fiber_ = true;
  is_quiet_ = false;
  thread.fiber->resume();
  in_fiber_ = false;
  current_ = -1;
  if (!failure_.empty()) throw Failed{};
  if (thread.fiber->has_ended()) thread.pending.kind = Pending::Kind::ended;
}

// Makes the first possible read, or postpones it. Returns whether there was one.
bool Explorer::run_reads() {
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    Thread& thread = *threads_[i];
    if (thread.pending.kind != Pending::Kind::read || !needs_evaluation(thread)) continue;
    const std::vector<std::vector<int>> scripts = evaluate(i);
    if (scripts.empty()) continue;
    decision_ = depth_;
    const int chosen = decide(static_cast<int>(scripts.size()), true);
    if (chosen < static_cast<int>(scripts.size())) {
      try_script(i, scripts[chosen], true);
      thread.postponed.clear();
      run_fiber(i);
    } else {
      thread.postponed = thread.watched;
    }
    return true;
  }
  return false;
}

bool Explorer::needs_evaluation(const Thread& thread) const {
  if (!thread.is_evaluated) return true;
  for (const Load& load : thread.watched) {
    if (memory_.num_messages(load.location) > load.message) return true;
  }
  return false;
}

// The combinations of messages for which ready() holds.
std::vector<std::vector<int>> Explorer::evaluate(int index) {
  Thread& thread = *threads_[index];
  std::vector<std::vector<int>> found;
  std::vector<Load> watched;
  std::vector<int> script;
  for (;;) {
    const bool holds = try_script(index, script, false);
    bool is_new = thread.postponed.empty();
    for (const Load& load : loads_) {
      bool is_watched = false;
      for (const Load& other : watched) is_watched = is_watched || other.location == load.location;
      if (!is_watched) watched.push_back({load.location, static_cast<uint32_t>(memory_.num_messages(load.location))});
      for (const Load& mark : thread.postponed) {
        is_new = is_new || (mark.location == load.location && load.message >= mark.message);
      }
    }
    if (holds && is_new) found.push_back(script_);
    script = script_;
    while (!script.empty() && script.back() + 1 >= counts_[script.size() - 1]) script.pop_back();
    if (script.empty()) break;
    ++script.back();
  }
  thread.watched = std::move(watched);
  thread.is_evaluated = true;
  return found;
}

// Evaluates ready() with the first messages from the script. Leaves the whole script in script_.
bool Explorer::try_script(int index, const std::vector<int>& script, bool keep) {
  Thread& thread = *threads_[index];
  const ThreadMemory before = thread.memory;
  current_ = index;
  evaluation_ = Evaluation::scripted;
  script_ = script;
  counts_.clear();
  loads_.clear();
  tick();
  const bool holds = (*thread.pending.ready)();
  evaluation_ = Evaluation::none;
  current_ = -1;
  if (!keep) {
    thread.memory = before;
    return holds;
  }
  ++outcome_.events;
  for (const Load& load : loads_) {
    memory_[load.location].reads.push_back({index, thread.memory.own.happened.at[index], decision_});
    if (load.location >= thread.stale.size()) thread.stale.resize(load.location + 1, {0, 0});
    auto& [message, count] = thread.stale[load.location];
    count = message == load.message ? count + 1 : 1;
    message = load.message;
  }
  thread.is_evaluated = false;
  return holds;
}

uint64_t Explorer::load_scripted(const void* at, int bytes, std::memory_order order) {
  Thread& thread = *threads_[current_];
  const size_t location = memory_.location(at, bytes);
  const uint32_t end = static_cast<uint32_t>(memory_.num_messages(location));
  uint32_t first = thread.memory.own.view.of(location);
  if (evaluation_ == Evaluation::latest) {
    first = end - 1;
  } else if (first + 1 < end && location < thread.stale.size() && thread.stale[location].first == first &&
             thread.stale[location].second >= kStaleReads) {
    ++first;
  }
  const size_t at_load = loads_.size();
  if (script_.size() == at_load) script_.push_back(0);
  counts_.push_back(static_cast<int>(end - first));
  const uint32_t message = first + script_[at_load];
  loads_.push_back({location, message});
  return memory_.read(thread.memory, location, message, order);
}

bool Explorer::run_ordered() {
  std::vector<int> options;
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    const Thread& thread = *threads_[i];
    if (thread.pending.kind != Pending::Kind::ordered || thread.is_asleep) continue;
    if ((*thread.pending.enabled)()) options.push_back(i);
  }
  if (options.empty()) return false;
  int chosen;
  if (options_.max_preemptions < 0) {
    chosen = decide(static_cast<int>(options.size()), false);
    for (int i = 0; i < chosen; ++i) threads_[options[i]]->is_asleep = true;
  } else {
    // The thread that ran last comes first, and loses its turn only a limited number of times.
    for (size_t i = 0; i < options.size(); ++i) {
      if (options[i] == last_ordered_) std::swap(options[0], options[i]);
    }
    const bool can_continue = options[0] == last_ordered_;
    const bool may_leave = !can_continue || preemptions_ < options_.max_preemptions;
    chosen = may_leave ? decide(static_cast<int>(options.size()), false) : 0;
    preemptions_ += can_continue && chosen != 0;
  }
  last_ordered_ = options[chosen];
  perform(options[chosen]);
  return true;
}

void Explorer::perform(int index) {
  Thread& thread = *threads_[index];
  ++outcome_.events;
  is_quiet_ = false;
  current_ = index;
  tick();
  (*thread.pending.perform)();
  // Threads waiting for an operation on the same object now come after it. A null object stands for a fence.
  for (auto& other : threads_) {
    const void* const object = other->pending.object;
    if (object == thread.pending.object || object == nullptr || thread.pending.object == nullptr) {
      other->is_asleep = false;
    }
  }
  run_fiber(index);
}

// One step of a random thread.
bool Explorer::step_randomly() {
  std::vector<int> options;
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    const Thread& thread = *threads_[i];
    switch (thread.pending.kind) {
      case Pending::Kind::run:
        options.push_back(i);
        break;
      case Pending::Kind::blocked:
      case Pending::Kind::ordered:
        if ((*thread.pending.enabled)()) options.push_back(i);
        break;
      case Pending::Kind::read:
        if (needs_evaluation(thread)) options.push_back(i);
        break;
      case Pending::Kind::ended:
        break;
    }
  }
  while (!options.empty()) {
    const size_t at = random_() % options.size();
    const int index = options[at];
    Thread& thread = *threads_[index];
    if (thread.pending.kind == Pending::Kind::ordered) {
      perform(index);
      return true;
    }
    if (thread.pending.kind != Pending::Kind::read) {
      run_fiber(index);
      return true;
    }
    const std::vector<std::vector<int>> scripts = evaluate(index);
    if (!scripts.empty() && random_() % kPostponedReads != 0) {
      try_script(index, scripts[random_() % scripts.size()], true);
      thread.postponed.clear();
      run_fiber(index);
      return true;
    }
    // It has not looked in time, and sees only later messages.
    if (!scripts.empty()) thread.postponed = thread.watched;
    options.erase(options.begin() + at);
  }
  // A read that was postponed for a message that does not come.
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    Thread& thread = *threads_[i];
    if (thread.pending.kind != Pending::Kind::read || thread.postponed.empty() || would_end_waiting(i)) continue;
    thread.postponed.clear();
    thread.is_evaluated = false;
    return true;
  }
  return false;
}

// Called when no thread can go on: whether only because others cover this execution. Then a read was postponed for a
// message that never came, or an operation is explored elsewhere.
bool Explorer::is_redundant() {
  for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
    const Thread& thread = *threads_[i];
    if (thread.is_asleep && (*thread.pending.enabled)()) return true;
    if (thread.pending.kind == Pending::Kind::read && !would_end_waiting(i)) return true;
  }
  return false;
}

// Whether all threads that must end have ended.
bool Explorer::is_over() const {
  for (const auto& thread : threads_) {
    if (!thread->is_daemon && thread->pending.kind != Pending::Kind::ended) return false;
  }
  return true;
}

// Called when no thread can go on, not even by a timeout.
Explorer::End Explorer::finish() {
  if (!is_over()) {
    failure_ = "deadlock";
    return End::failed;
  }
  for (const auto& check : checks_) check();
  return End::complete;
}

// Whether the thread would wait forever, even with the latest messages.
bool Explorer::would_end_waiting(int index) {
  Thread& thread = *threads_[index];
  const ThreadMemory before = thread.memory;
  current_ = index;
  evaluation_ = Evaluation::latest;
  script_.clear();
  counts_.clear();
  loads_.clear();
  const bool holds = (*thread.pending.ready)();
  evaluation_ = Evaluation::none;
  current_ = -1;
  thread.memory = before;
  return !holds;
}

}  // namespace jax_ring::model
