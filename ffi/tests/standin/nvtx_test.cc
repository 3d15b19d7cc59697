// nvtx_test.cc: a profiler's view of a launch, through NVTX's own interface for profilers.
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "cuda/runtime/profiler_range.h"
#include "tests/standin/program/fixture.h"

namespace jax_ring::standin {
namespace {

#if defined(JAX_RING_HAS_NVTX)

std::mutex mutex;
std::vector<std::string> events;
thread_local int depth = 0;

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back(std::string("domain ") + name);
  static char domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int NVTX_API push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back(attributes->message.ascii);
  return depth++;
}

int NVTX_API pop(nvtxDomainHandle_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back("end");
  return --depth;
}

// A profiler's reaction to the first use of NVTX; see nvtx_attach.cc.
int NVTX_API attach(NvtxGetExportTableFunc_t table_of) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table_of(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size)) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}

using Nvtx = StandinTest;

// At least this many ranges, all named after the call, and all ended.
void expect_ranges(int at_least, const std::string& call) {
  const std::lock_guard<std::mutex> lock(mutex);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events[0], "domain jax_ring");
  int begins = 0, ends = 0;
  for (size_t i = 1; i < events.size(); ++i) {
    if (events[i] == "end") {
      ++ends;
    } else {
      ++begins;
      EXPECT_TRUE(says(events[i], call));
      EXPECT_TRUE(says(events[i], "train.py:7"));
    }
  }
  EXPECT_GE(begins, at_least);
  EXPECT_EQ(begins, ends);
}

TEST_F(Nvtx, EachLaunchHasARangeWithTheNameOfItsCall) {
  start({2});
  CallSpec what{members()};
  what.call = "ring_psum of float32[1000] over axis 'data'";
  Call call(what, 1);
  Program program(0, *gpus_, {&call});
  program.run_and_check();
  expect_ranges(2, what.call);
  // A failing launch ends its range as well. The other GPU may not come so far.
  Machine::instance().fail("cudaLaunchKernelExC", cudaErrorLaunchOutOfResources, 2);
  for (const std::string& error : program.run()) EXPECT_NE(error, "");
  expect_ranges(3, what.call);
}

#endif

}  // namespace
}  // namespace jax_ring::standin

extern "C" int attach_profiler(const void* (*table_of)(uint32_t)) {
#if defined(JAX_RING_HAS_NVTX)
  return jax_ring::standin::attach(table_of);
#else
  return table_of == nullptr;
#endif
}
