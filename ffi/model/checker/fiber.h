// fiber.h: threads of the model, which take turns on one thread of the host.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <memory>

namespace jax_ring::model {

// Runs a function with a stack of its own, in turns with the caller.
class Fiber {
 public:
  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The body of the next start. A body that has not ended is abandoned, without destructors.
  void reset(std::function<void()> body);
  // Called by the scheduler: goes on until the body waits or ends.
  void resume();
  // Called by the body: goes back to the scheduler.
  void wait();
  bool has_ended() const { return ended_; }

 private:
  static void enter(unsigned high, unsigned low);

  static constexpr size_t kStackBytes = 512 << 10;
  std::unique_ptr<unsigned char[]> stack_;
  ucontext_t context_;
  jmp_buf inside_, outside_;  // used once started: unlike swapcontext, they need no system call
  bool started_ = false, ended_ = false;
  std::function<void()> body_;
};

}  // namespace jax_ring::model
