// multimem.h: single instructions of an NVSwitch: add the values in all mailboxes, or write to all of them.
#pragma once

#include "device/fold/fold_pack.h"
#include "device/fold/switch_adds.h"
#include "device/memory/endpoint.h"

namespace jax_ring {

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The sum of all ranks' values at this offset of their mailboxes.
template <class Element>
JAX_RING_TEAM Pack load_sum(const Endpoint& self, size_t offset) {
  const unsigned char* from = self.multicast + offset;
  if constexpr (std::is_same_v<Element, Native<float>>) {
    float x[4];
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(from)
                 : "memory");
    Pack sum;
    memcpy(&sum, x, sizeof(sum));
    return sum;
  } else if constexpr (std::is_same_v<Element, Native<double>>) {
    double x[2];
    for (int i = 0; i < 2; ++i) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f64 %0, [%1];"
                   : "=d"(x[i])
                   : "l"(from + 8 * i)
                   : "memory");
    }
    Pack sum;
    memcpy(&sum, x, sizeof(sum));
    return sum;
  } else if constexpr (std::is_same_v<Element, Native<uint64_t>>) {
    Pack sum;
    for (int i = 0; i < 2; ++i) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u64 %0, [%1];"
                   : "=l"(sum.word[i])
                   : "l"(from + 8 * i)
                   : "memory");
    }
    return sum;
  } else {
    uint32_t x[4];
    if constexpr (std::is_same_v<Element, BFloat16>) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "l"(from)
                   : "memory");
    } else if constexpr (std::is_same_v<Element, Float16>) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "l"(from)
                   : "memory");
    } else {
      static_assert(std::is_same_v<Element, Native<uint32_t>>, "the switch cannot add this type");
      for (int i = 0; i < 4; ++i) {
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];"
                     : "=r"(x[i])
                     : "l"(from + 4 * i)
                     : "memory");
      }
    }
    Pack sum;
    memcpy(&sum, x, sizeof(sum));
    return sum;
  }
}

// Writes to this offset of all mailboxes. PTX has vectors of floats only, but a store changes no bits.
JAX_RING_TEAM void store_to_all(const Endpoint& self, size_t offset, Pack pack) {
  float x[4];
  memcpy(x, &pack, sizeof(x));
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(self.multicast + offset),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// The multicast address and the mailboxes' own addresses lead to the same memory. PTX orders accesses by different
// addresses only if this fence is on the path between them.
JAX_RING_TEAM void order_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

#else

// Older GPUs lack these instructions. They have no multicast address either, so this never runs.
template <class Element>
JAX_RING_TEAM Pack load_sum(const Endpoint&, size_t) {
  __trap();
  return {};
}
JAX_RING_TEAM void store_to_all(const Endpoint&, size_t, Pack) { __trap(); }
JAX_RING_TEAM void order_aliases() {}

#endif

#else

// On the host the switch is a loop.
template <class Element>
JAX_RING_TEAM Pack load_sum(const Endpoint& self, size_t offset) {
  PackFold<Element> fold;
  for (int rank = 0; rank < self.num_ranks(); ++rank) {
    const Pack pack = read_pack(reinterpret_cast<const Pack*>(self.mailbox[rank] + offset));
    rank == 0 ? fold.start(pack) : fold.add(pack, Sum{});
  }
  return fold.result();
}

JAX_RING_TEAM void store_to_all(const Endpoint& self, size_t offset, Pack pack) {
  for (int rank = 0; rank < self.num_ranks(); ++rank) {
    write_pack(reinterpret_cast<Pack*>(self.mailbox[rank] + offset), pack);
  }
}

JAX_RING_TEAM void order_aliases() {}

#endif

}  // namespace jax_ring
