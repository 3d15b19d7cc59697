// profiler_range.h: names a thread's work for NVIDIA's profilers (NVTX). Without a profiler it costs a branch.
#pragma once

// Header only, of the CUDA toolkit. Without it there are no ranges.
#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define JAX_RING_HAS_NVTX 1
#endif
#endif

namespace jax_ring::gpu {

#if defined(JAX_RING_HAS_NVTX)

// Ranges of one thread are nested: each end belongs to the last begin.
inline nvtxDomainHandle_t profiler_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("jax_ring");
  return domain;
}

inline void begin_profiler_range(const char* name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(profiler_domain(), &attributes);
}

inline void end_profiler_range() noexcept { nvtxDomainRangePop(profiler_domain()); }

#else

inline void begin_profiler_range(const char*) noexcept {}
inline void end_profiler_range() noexcept {}

#endif

}  // namespace jax_ring::gpu
