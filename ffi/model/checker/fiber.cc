// fiber.cc: starts a fiber with makecontext, and switches with _setjmp.
#include "model/checker/fiber.h"

#include <cstdint>

namespace jax_ring::model {

Fiber::Fiber() : stack_(new unsigned char[kStackBytes]) {}

void Fiber::reset(std::function<void()> body) {
  body_ = std::move(body);
  started_ = ended_ = false;
}

void Fiber::enter(unsigned high, unsigned low) {
  Fiber* const self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
  self->body_();
  self->ended_ = true;
  _longjmp(self->outside_, 1);
}

void Fiber::resume() {
  if (_setjmp(outside_) != 0) return;
  if (started_) _longjmp(inside_, 1);
  started_ = true;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const uintptr_t self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
  setcontext(&context_);
}

void Fiber::wait() {
  if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
}

}  // namespace jax_ring::model
