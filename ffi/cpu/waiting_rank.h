// waiting_rank.h: a rank that has arrived, and whose thread waits for the others in its call for a moment.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "common/threads.h"

namespace jax_ring::cpu {

// To return to the runtime with a result that is there costs nothing. To complete a call later takes two wakes, of a
// thread that completes it and of the thread that the runtime blocked meanwhile: tens of microseconds each, where a
// core has gone to sleep. So a rank waits for those that come soon after it, and takes a share of their work. It never
// waits for long: its thread may be one that others need.
class WaitingRank {
 public:
  static constexpr std::chrono::microseconds kWaitTime{50};

  // Whether nobody knows of it any more, so that it may be used for another call.
  bool is_free() const { return is_free(state_.load(std::memory_order_acquire)); }

  // By whoever adds the rank to its rendezvous. It must be free.
  void start(bool has_own_core) {
    has_own_core_ = has_own_core;
    state_.store(State::waiting, std::memory_order_relaxed);
  }
  void skip() { state_.store(State::skipped, std::memory_order_relaxed); }

  // By the rank's thread. Whether the call is done. If not, its completion has been called or will be: the rank has not
  // been started, or the time was over.
  bool wait();

  // Whether it would take a share of the work now.
  bool is_waiting() const { return state_.load(std::memory_order_relaxed) == State::waiting; }

  // By the thread that executes the collective, before it is done: a share of the work. Returns whether the rank is
  // waiting, and so will do it.
  bool offer(std::function<void()> share);

  // By the thread that has executed the collective. Returns true if the rank was waiting: it goes on by itself. Else
  // its completion must be called. The last that anybody but the rank's thread does with this object.
  bool release() { return state_.exchange(State::released, std::memory_order_acq_rel) != State::left; }

 private:
  enum class State : uint32_t {
    skipped,  // it does not wait
    waiting,
    offered,   // there is a share of the work
    working,   // it has taken it
    left,      // it waits no longer
    released,  // it goes on
  };

  static bool is_free(State state) { return state == State::skipped || state == State::released; }

  Atomic<State> state_{State::skipped};
  bool has_own_core_ = false;
  std::function<void()> share_;
};

using WaitingRankPtr = std::shared_ptr<WaitingRank>;

}  // namespace jax_ring::cpu
