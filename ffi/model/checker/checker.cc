// checker.cc: functions for scenarios and for the replacements of atomics, on the running explorer.
#include "model/checker/checker.h"

#include <cstring>
#include <sstream>
#include <utility>

#include "model/checker/explorer.h"
#include "model/checker/futex.h"

namespace jax_ring::model {
namespace {

Explorer* explorer = nullptr;  // the only running one
uint64_t num_executions = 0;

}  // namespace

Outcome explore(const Options& options, const std::function<void()>& scenario) {
  Outcome outcome;
  {
    Explorer local(options);
    explorer = &local;
    outcome = local.run([&] {
      ++num_executions;
      scenario();
    });
  }
  explorer = nullptr;
  return outcome;
}

void Explorer::spawn(const std::string& name, std::function<void()> body, bool is_daemon) {
  const size_t index = threads_.size();
  if (index == kMaxThreads) fail("too many threads");
  if (index == fibers_.size()) fibers_.emplace_back();
  auto thread = std::make_unique<Thread>();
  thread->name = name;
  thread->is_daemon = is_daemon;
  thread->fiber = &fibers_[index];
  if (current_ >= 0) {
    thread->memory.own = threads_[current_]->memory.own;
    thread->memory.cause = threads_[current_]->memory.cause;
    tick();  // the parent's later actions do not happen before the new thread
  }
  thread->fiber->reset(std::move(body));
  threads_.push_back(std::move(thread));
}

void Explorer::fail(const std::string& why) {
  if (failure_.empty()) {
    failure_ = why + (current_ < 0 ? "" : " (" + threads_[current_]->name + ")");
  }
  if (!in_fiber_) throw Failed{};
  for (;;) threads_[current_]->fiber->wait();  // never resumed
}

std::string Explorer::describe_threads() const {
  std::ostringstream text;
  for (const auto& thread : threads_) {
    text << "  " << thread->name << ": ";
    switch (thread->pending.kind) {
      case Pending::Kind::ended:
        text << "has ended";
        break;
      case Pending::Kind::read:
        text << "reads";
        for (const Load& load : thread->watched) {
          const Location& location = const_cast<Explorer*>(this)->memory_[load.location];
          text << " [" << memory_.describe(location.address) << " = " << std::hex << location.messages.back().value
               << std::dec << "]";
        }
        break;
      default:
        text << (thread->pending.what.empty() ? "runs" : thread->pending.what);
    }
    text << "\n";
  }
  return text.str();
}

// Begins an event of the running thread.
void Explorer::tick() {
  ThreadMemory& memory = threads_[current_]->memory;
  memory.cause.at[current_] = ++memory.own.happened.at[current_];
}

void Explorer::await(const std::function<bool()>& ready) {
  if (current_ < 0) return;
  Thread& thread = *threads_[current_];
  thread.pending.kind = Pending::Kind::read;
  thread.pending.ready = &ready;
  thread.pending.object = &thread;
  thread.is_evaluated = false;
  thread.watched.clear();
  thread.fiber->wait();
}

uint64_t Explorer::load(const void* at, int bytes, std::memory_order order) {
  if (current_ < 0) {  // while a scenario sets up or checks
    uint64_t value = 0;
    std::memcpy(&value, at, bytes);
    return value;
  }
  if (evaluation_ != Evaluation::none) return load_scripted(at, bytes, order);
  uint64_t value = 0;
  if (order == std::memory_order_seq_cst) {
    ordered(
        at, "a sequentially consistent load", [] { return true; },
        [&] {
          const size_t location = memory_.location(at, bytes);
          ThreadMemory& memory = threads_[current_]->memory;
          const uint32_t first = std::max(memory.own.view.of(location), memory_[location].latest_sc);
          const uint32_t end = static_cast<uint32_t>(memory_.num_messages(location));
          value = memory_.read(memory, location, first + choose(static_cast<int>(end - first)), order);
        });
    return value;
  }
  await([&] {
    value = load_scripted(at, bytes, order);
    return true;
  });
  return value;
}

// A store appends to the history. Earlier reads may also be made after it, unless it depends on them.
void Explorer::note_store(size_t at, const ThreadMemory& memory, int thread) {
  for (const ReadRecord& read : memory_[at].reads) {
    if (read.thread == thread || memory.cause.at[read.thread] >= read.event) continue;
    if (read.decision < decisions_.size()) decisions_[read.decision].may_postpone = true;
  }
}

void Explorer::store(void* at, int bytes, uint64_t value, std::memory_order order) {
  if (current_ < 0) {
    std::memcpy(at, &value, bytes);
    return;
  }
  if (order == std::memory_order_seq_cst) {
    modify(at, bytes, [=](uint64_t) { return value; }, order);
    return;
  }
  tick();
  ++outcome_.events;
  const size_t location = memory_.location(at, bytes);
  ThreadMemory& memory = threads_[current_]->memory;
  const Message& last = memory_[location].messages.back();
  const int writer = memory_[location].writer;
  if (writer >= 0 && writer != current_ && memory.cause.at[writer] < last.cause.at[writer]) {
    fail("two threads store to " + memory_.describe(memory_[location].address) + " in no order");
  }
  note_store(location, memory, current_);
  memory_.append(memory, current_, location, value, order, nullptr);
}

uint64_t Explorer::modify(void* at, int bytes, const Change& change, std::memory_order order) {
  uint64_t value = 0;
  if (current_ < 0) {
    std::memcpy(&value, at, bytes);
    if (const std::optional<uint64_t> changed = change(value)) std::memcpy(at, &*changed, bytes);
    return value;
  }
  ordered(
      at, "a read-modify-write", [] { return true; },
      [&] {
        const size_t location = memory_.location(at, bytes);
        ThreadMemory& memory = threads_[current_]->memory;
        const uint32_t last = static_cast<uint32_t>(memory_.num_messages(location)) - 1;
        value = memory_.read(memory, location, last, order);
        const std::optional<uint64_t> changed = change(value);
        if (!changed) return;
        note_store(location, memory, current_);
        const Message previous = memory_[location].messages[last];
        memory_.append(memory, current_, location, *changed, order, &previous);
      });
  return value;
}

void Explorer::fence(std::memory_order order) {
  if (current_ < 0) return;
  if (order != std::memory_order_seq_cst) {
    tick();
    return memory_.fence(threads_[current_]->memory, order);
  }
  ordered(
      nullptr, "a sequentially consistent fence", [] { return true; },
      [&] { memory_.fence(threads_[current_]->memory, order); });
}

void Explorer::plain(const void* at, size_t bytes, bool writes) {
  if (current_ < 0) return;
  tick();
  const ThreadMemory& memory = threads_[current_]->memory;
  const std::string race =
      writes ? memory_.plain_write(memory, current_, at, bytes) : memory_.plain_read(memory, current_, at, bytes);
  if (!race.empty()) fail("data race: " + race);
}

void Explorer::ordered(const void* object, const std::string& what, const std::function<bool()>& enabled,
                       const std::function<void()>& perform) {
  if (current_ < 0) return perform();
  Thread& thread = *threads_[current_];
  thread.pending = {Pending::Kind::ordered, nullptr, &enabled, &perform, object, what};
  thread.fiber->wait();
}

void Explorer::block(const std::string& what, const std::function<bool()>& enabled) {
  if (current_ < 0) return;
  Thread& thread = *threads_[current_];
  thread.pending = {Pending::Kind::blocked, nullptr, &enabled, nullptr, &thread, what};
  thread.fiber->wait();
}

void spawn(const std::string& name, std::function<void()> body) { explorer->spawn(name, std::move(body), false); }
void spawn_daemon(const std::string& name, std::function<void()> body) { explorer->spawn(name, std::move(body), true); }
void at_end(std::function<void()> check) { explorer->at_end(std::move(check)); }
void fail(const std::string& why) { explorer->fail(why); }
void name_memory(const void* at, size_t bytes, const std::string& text) { explorer->memory().name(at, bytes, text); }
uint64_t load(const void* at, int bytes, std::memory_order order) { return explorer->load(at, bytes, order); }
void store(void* at, int bytes, uint64_t value, std::memory_order order) { explorer->store(at, bytes, value, order); }
uint64_t modify(void* at, int bytes, const Change& change, std::memory_order order) {
  return explorer->modify(at, bytes, change, order);
}
void fence(std::memory_order order) { explorer->fence(order); }
void see_latest() { explorer->memory().see_latest(explorer->current()->memory); }
void plain_read(const void* at, size_t bytes) { explorer->plain(at, bytes, false); }
void plain_write(const void* at, size_t bytes) { explorer->plain(at, bytes, true); }
void await(const std::function<bool()>& ready) { explorer->await(ready); }
void ordered(const void* object, const std::string& what, const std::function<bool()>& enabled,
             const std::function<void()>& perform) {
  explorer->ordered(object, what, enabled, perform);
}
void block(const std::string& what, const std::function<bool()>& enabled) { explorer->block(what, enabled); }
void futex_wait(const void* word, uint32_t seen) { explorer->futex_wait(word, seen); }
void futex_wake(const void* word) { explorer->futex_wake(word); }
int choose(int count) { return explorer->choose(count); }
bool is_quiet() { return explorer->is_quiet(); }
int this_thread() { return explorer == nullptr ? -1 : explorer->this_thread(); }
uint64_t execution() { return num_executions; }

struct Baton::State {
  Knowledge given;
  Clock cause;
};

Baton::Baton() : state_(new State) {}
Baton::~Baton() { delete state_; }

void Baton::give() {
  Thread* const thread = explorer->current();
  if (thread == nullptr) return;
  explorer->tick();
  state_->given.join(thread->memory.own);
  state_->cause.join(thread->memory.cause);
  explorer->tick();
}

void Baton::take() {
  Thread* const thread = explorer->current();
  if (thread == nullptr) return;
  thread->memory.own.join(state_->given);
  thread->memory.cause.join(state_->cause);
}

bool Barrier::arrive(bool mine) {
  const uint64_t round = round_;
  Baton& baton = batons_[round % 2];  // the next round begins before all have taken from this one
  baton.give();
  all_ = all_ && mine;
  if (++arrived_ == size_) {
    result_ = std::exchange(all_, true);
    arrived_ = 0;
    ++round_;
  } else {
    block("waits at a barrier", [&] { return round_ != round; });
  }
  const bool result = result_;
  baton.take();
  return result;
}

}  // namespace jax_ring::model
