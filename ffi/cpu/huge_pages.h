// huge_pages.h: asks the kernel for huge pages before a large result is written.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_ring::cpu {

// Large results are mostly fresh memory. With huge pages 2 MiB of it take one fault, not 512. Whole pages only, to
// leave memory beyond the buffer alone. No effect if the memory is present already, or the system has no huge pages.
inline void advise_huge_pages([[maybe_unused]] void* buffer, [[maybe_unused]] size_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + num_bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_ring::cpu
