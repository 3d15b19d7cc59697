// huge_pages_test.cc: huge pages are requested inside a buffer, and nowhere else.
#include "cpu/huge_pages.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace jax_ring::cpu {
namespace {

constexpr size_t kHugePage = 2 << 20;

// Whether the mapping around an address is advised to have huge pages, according to smaps in proc(5).
bool is_advised(const std::byte* address) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  bool is_here = false;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (std::istringstream words(line); words >> std::hex >> begin >> dash >> end && dash == '-') {
      is_here = begin <= wanted && wanted < end;
    } else if (is_here && line.rfind("VmFlags:", 0) == 0) {
      return (line + " ").find(" hg ") != std::string::npos;
    }
  }
  return false;
}

class HugePages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) GTEST_SKIP() << "the kernel has no huge pages";
    void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    mapped_ = static_cast<std::byte*>(at);
    page_ = mapped_ + (kHugePage - reinterpret_cast<uintptr_t>(at) % kHugePage);
  }
  void TearDown() override {
    if (mapped_ != nullptr) munmap(mapped_, kBytes);
  }

  static constexpr size_t kBytes = 5 * kHugePage;
  std::byte* mapped_ = nullptr;
  std::byte* page_ = nullptr;  // the first huge page of the mapping
};

TEST_F(HugePages, WholeOnesInsideTheBuffer) {
  advise_huge_pages(page_ - 64, 2 * kHugePage + 128);
  EXPECT_TRUE(is_advised(page_));
  EXPECT_TRUE(is_advised(page_ + 2 * kHugePage - 1));
  EXPECT_FALSE(is_advised(page_ - 1));
  EXPECT_FALSE(is_advised(page_ + 2 * kHugePage));
}

TEST_F(HugePages, NoneInASmallBuffer) {
  advise_huge_pages(page_ + 64, 2 * kHugePage - 128);
  EXPECT_FALSE(is_advised(page_ + 64));
  EXPECT_FALSE(is_advised(page_ + kHugePage));
}

}  // namespace
}  // namespace jax_ring::cpu
