// many_groups_test.cc: hundreds of groups of processes in the little shared memory that a container has by default.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "shm/group/communicators.h"
#include "tests/support/processes.h"

namespace jax_ring::shm {
namespace {

constexpr int kProcesses = 4, kGroups = 200;
constexpr int kCannot = 77;  // exit status: this system does not let the test mount anything

// Gives this process and its children a /dev/shm of their own. Returns whether that worked.
bool mount_shared_memory(const char* options) {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << user << " " << user << " 1";
    std::ofstream("/proc/self/gid_map") << group << " " << group << " 1";
  }
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/dev/shm", "tmpfs", 0, options) == 0;
}

// One call of each group.
void call_all(uint64_t first_id, size_t count) {
  std::vector<std::unique_ptr<GroupCall>> calls;
  for (int i = 0; i < kGroups; ++i) {
    std::vector<Member> members;
    for (int64_t other = 0; other < kProcesses; ++other) members.emplace_back(other, kProcesses * i + other);
    const std::shared_ptr<Communicator> communicator = Communicators::instance().get_or_create(members);
    const auto expected = [](const std::vector<Bytes>& operands, size_t elements, int rank) {
      return expected_result({}, Op::sum, DType::f32, operands, elements, rank);
    };
    calls.push_back(std::make_unique<GroupCall>(cpu::Message{DType::f32, {count}, {}, Op::sum}, kProcesses, false,
                                                false, first_id + i, expected));
    calls.back()->submit(*communicator);
    calls.back()->expect_results_of(communicator->group());
  }
}

// In a process of its own.
[[noreturn]] void be(int64_t process) {
  Communicators::instance().join(process, "many-groups-" + std::to_string(getppid()), "0123456789abcdef");
  // Each group asks for more with its first call, before the next group gets its first segment.
  call_all(1, 20'000);
  call_all(1 + kGroups, 10);
  std::fflush(nullptr);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}

[[noreturn]] void run_all() {
  if (!mount_shared_memory("size=64m")) _exit(kCannot);
  std::vector<pid_t> children;
  for (int64_t process = 0; process < kProcesses; ++process) {
    children.push_back(fork());
    if (children.back() == 0) be(process);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) failed = 1;
  }
  struct statvfs system;
  // All memory ends with the processes: no name is left.
  if (statvfs("/dev/shm", &system) != 0 || system.f_bavail != system.f_blocks) failed = 2;
  _exit(failed);
}

TEST(ManyGroups, FitIntoTheMemoryOfAContainer) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) run_all();
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kCannot) GTEST_SKIP() << "this test needs to mount a file system of its own";
  EXPECT_NE(WEXITSTATUS(status), 2) << "names are left in /dev/shm";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "a process has failed";
}

}  // namespace
}  // namespace jax_ring::shm
