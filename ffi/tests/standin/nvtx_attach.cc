// nvtx_attach.cc: replaces a profiler that is linked into the program. NVTX's headers define the same symbol, as a weak
// one, so this file cannot include them.
#include <cstdint>

extern "C" {
int attach_profiler(const void* (*table_of)(uint32_t));
int (*InitializeInjectionNvtx2_fnptr)(const void* (*)(uint32_t)) = &attach_profiler;
}
