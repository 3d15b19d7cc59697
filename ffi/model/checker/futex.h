// futex.h: Linux's futex in the model.
#pragma once

#include <cstdint>

namespace jax_ring::model {

// As in the kernel, both begin with a full barrier. Then, one at a time for each word, the wait compares the word and
// sleeps, and the wake wakes all that sleep.
void futex_wait(const void* word, uint32_t seen);
void futex_wake(const void* word);

}  // namespace jax_ring::model
