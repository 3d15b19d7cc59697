// futex.h: Linux's futex in the model.
#pragma once

#include <cstdint>

namespace jax_ring::model {

// As in the kernel, both begin with a full barrier. After it, one at a time per word, the wait compares the word and
// sleeps, and the wake wakes all sleepers.
void futex_wait(const void* word, uint32_t seen);
void futex_wake(const void* word);

}  // namespace jax_ring::model
