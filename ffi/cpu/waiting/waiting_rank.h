// waiting_rank.h: a rank that has arrived, and whose thread waits for the others in its call for a moment.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/threads.h"

namespace jax_ring::cpu {

// To return to the runtime with a result that is there costs nothing. To complete a call later takes two wakes, of a
// thread that completes it and of the thread that the runtime blocked meanwhile: tens of microseconds each, where a
// core has gone to sleep. So a rank waits for those that come soon after it, and takes a share of their work. It never
// waits for long: its thread may be one that others need.
//
// Where ranks meet again and again, they are faster on threads of the runtime's pool, which has at least as many as
// there are ranks. A thread of the pool without a task polls for one for some 50 us and does not yield its core, which
// ranks need. When all of them run ranks, none does.
class WaitingRank {
 public:
  // How a rank waits.
  struct Terms {
    std::chrono::nanoseconds limit{};
    bool spins = false;                      // it has a core of its own
    bool moves = false;                      // on another thread, one of the pool, where it goes on
    std::optional<int> core = std::nullopt;  // that it moves to
  };

  // Whether nobody knows of it any more, so that it may be used for another call.
  bool is_free() const { return is_free(state_.load(std::memory_order_acquire)); }

  // By whoever adds the rank to its rendezvous. It must be free.
  void start(const Terms& terms) {
    terms_ = terms;
    state_.store(terms.moves ? State::moving : State::waiting, std::memory_order_relaxed);
  }
  void skip() {
    terms_ = {};
    state_.store(State::skipped, std::memory_order_relaxed);
  }

  // By the rank's thread, after its arrival. Whether another thread has to wait in its place, one of the pool.
  bool moves() const { return terms_.moves; }

  // By the thread that waits. Whether the call is done, and the rank goes on there. If not, its completion has been
  // called or will be: the rank has not been started, the time was over, or a completion thread came before one of the
  // pool.
  bool wait();

  // Whether it would take a share of the work now.
  bool is_waiting() const { return state_.load(std::memory_order_relaxed) == State::waiting; }

  // By the thread that executes the collective, before it is done: a share of the work. Returns whether the rank is
  // waiting, and so will do it.
  bool offer(std::function<void()> share);

  enum class Released { goes_on, has_left, moves };

  // By the thread that has executed the collective. If the rank goes on, it was waiting. Else its completion must be
  // called; if it moves, by whoever takes it over. For all others this is the last that anybody but the rank's thread
  // does with this object.
  Released release();

  // By a completion thread, before it calls the rank's completion: false if a thread of the pool has come first. Gives
  // that a moment.
  bool take_over();

 private:
  enum class State : uint32_t {
    skipped,  // it does not wait
    moving,   // it will, once a thread of the pool has time
    movable,  // none had so far, and the call is done
    taken,    // its completion is called
    waiting,
    offered,   // there is a share of the work
    working,   // it has taken it
    left,      // it waits no longer
    released,  // it goes on
  };

  static bool is_free(State state) { return state == State::skipped || state == State::released; }

  Atomic<State> state_{State::skipped};
  Terms terms_;
  std::function<void()> share_;
};

using WaitingRankPtr = std::shared_ptr<WaitingRank>;

}  // namespace jax_ring::cpu
