// waiting_rank.h: a rank that has arrived, with its thread waiting in the call for the others, for a moment.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/threads.h"

namespace jax_ring::cpu {

// Returning a finished result to the runtime costs nothing. Completing a call later takes two wakes: of a completion
// thread, and of the thread that the runtime blocked meanwhile. Each takes tens of microseconds if its core sleeps. So
// a rank waits for others that arrive soon, and takes a share of their work. It never waits for long: other ranks may
// need its thread.
//
// Ranks that meet again and again are faster on threads of the runtime's pool, which has at least one per rank. An idle
// pool thread polls for tasks for some 50 us without yielding its core, and ranks need that core. If all pool threads
// run ranks, none does.
class WaitingRank {
 public:
  // How a rank waits.
  struct Terms {
    std::chrono::nanoseconds limit{};
    bool spins = false;                      // it has a core of its own
    bool moves = false;                      // to a pool thread, where it goes on
    std::optional<int> core = std::nullopt;  // the core that it moves to
  };

  // Whether nobody refers to it any more, so that another call may use it.
  bool is_free() const { return is_free(state_.load(std::memory_order_acquire)); }

  // Called by whoever adds the rank to its rendezvous. The rank must be free.
  void start(const Terms& terms) {
    terms_ = terms;
    state_.store(terms.moves ? State::moving : State::waiting, std::memory_order_relaxed);
  }
  void skip() {
    terms_ = {};
    state_.store(State::skipped, std::memory_order_relaxed);
  }

  // Called by the rank's thread after its arrival. Returns whether a pool thread has to wait in its place.
  bool moves() const { return terms_.moves; }

  // Called by the waiting thread. Returns whether the call is done and the rank goes on there. If not, its completion
  // has run or will run: the rank was never started, its time was over, or a completion thread came before a pool
  // thread.
  bool wait();

  // Whether it would take a share of the work now.
  bool is_waiting() const { return state_.load(std::memory_order_relaxed) == State::waiting; }

  // Called by the thread that executes the collective, before it is done: offers a share of the work. Returns whether
  // the rank is waiting, and so will do it.
  bool offer(std::function<void()> share);

  enum class Released { goes_on, has_left, moves };

  // Called by the thread that executed the collective. If the rank goes on, it was waiting. Else someone must call its
  // completion; if the rank moves, whoever takes it over. For all others this is the last access to this object by
  // anyone but the rank's thread.
  Released release();

  // Called by a completion thread before it runs the rank's completion. Returns false if a pool thread came first,
  // after giving it a moment.
  bool take_over();

 private:
  enum class State : uint32_t {
    skipped,  // it does not wait
    moving,   // it will wait, once a pool thread has time
    movable,  // no pool thread had time so far, and the call is done
    taken,    // its completion has been called
    waiting,
    offered,   // a share of the work is offered
    working,   // it has taken the share
    left,      // it no longer waits
    released,  // it goes on
  };

  static bool is_free(State state) { return state == State::skipped || state == State::released; }

  Atomic<State> state_{State::skipped};
  Terms terms_;
  std::function<void()> share_;
};

using WaitingRankPtr = std::shared_ptr<WaitingRank>;

}  // namespace jax_ring::cpu
