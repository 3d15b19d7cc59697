// huge_pages.h: asks the kernel for huge pages before a large result is written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace jax_ring::cpu {

// Large results are mostly fresh memory. With huge pages 2 MiB of it take one fault, not 512. Whole pages only, to
// leave memory beyond the buffer alone. No effect if the memory is present already, or the system has no huge pages.
inline void advise_huge_pages(void* buffer, size_t num_bytes) {
  constexpr uintptr_t kPage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + num_bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace jax_ring::cpu
