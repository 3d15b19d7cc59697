// shared_memory_test.cc: the names of segments, and everyone's error if one process cannot map them.
#include "shm/memory/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/call_failure.h"

namespace jax_ring::shm {
namespace {

constexpr size_t kTooMany = size_t{1} << 50;  // bytes
constexpr double kDeadline = 30;              // seconds; no test waits so long

const Segments::Stop kNever = [] { return false; };

// A group's processes, in this one.
class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() : name_("/jax_ring-test-" + std::to_string(getpid()) + "-" + std::to_string(next_++)) {}

  SharedMemory of(int num_processes, int self, double seconds = kDeadline, std::string host_id = "") const {
    std::vector<int64_t> processes;
    for (int process = 0; process < num_processes; ++process) processes.push_back(process);
    return SharedMemory(name_, std::move(processes), self, [seconds] { return seconds; }, std::move(host_id));
  }
  bool exists(const std::string& suffix = "") const {
    struct stat status;
    return lstat(("/dev/shm" + name_ + suffix).c_str(), &status) == 0;
  }

  const std::string name_;

 private:
  static inline int next_ = 0;
};

CallFailure failure_of(Segments& segments, size_t bytes) {
  try {
    segments.connect(bytes, kNever);
  } catch (const CallError& error) {
    return error.failure;
  }
  return {};
}

std::string error_of(Segments& segments, size_t bytes) { return failure_of(segments, bytes).text; }

void expect_in(const std::string& expected, const std::string& text) {
  EXPECT_NE(text.find(expected), std::string::npos) << text;
}

// During its lifetime, this process can open no further file.
class NoFiles {
 public:
  NoFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const struct rlimit none{0, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  struct rlimit before_;
};

TEST_F(SharedMemoryTest, HasNoNameOnceAllHaveMappedIt) {
  SharedMemory leader = of(2, 0), other = of(2, 1);
  const Memory first = leader.connect(100, kNever), second = other.connect(100, kNever);
  first.get()[99] = 42;
  EXPECT_EQ(second.get()[99], 42);
  EXPECT_FALSE(exists());
  SharedMemory late = of(2, 1, 0.05), again = of(2, 0);
  expect_in("did not create the shared memory within 0.05 s", error_of(late, 100));
  // New memory can be created under the same name, and does not contain the old data.
  EXPECT_EQ(again.connect(100, kNever).get()[99], 0);
  // Its first process released it before any other mapped it.
  expect_in("has already released it", error_of(late, 100));
}

TEST_F(SharedMemoryTest, LeavesNoNameIfAProcessIsMissing) {
  SharedMemory leader = of(3, 0), other = of(3, 1);
  Memory first = leader.connect(100, kNever), second = other.connect(100, kNever);
  struct stat status;
  ASSERT_EQ(stat(("/dev/shm" + name_).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(status.st_uid, geteuid());
  second.reset();  // the first one to release it unlinks the name
  EXPECT_FALSE(exists());
}

TEST_F(SharedMemoryTest, AllHearThatThereIsNoSpace) {
  SharedMemory leader = of(3, 0), waiting = of(3, 1), late = of(3, 2);
  CallFailure heard;
  std::thread waits([&] { heard = failure_of(waiting, kTooMany); });
  const CallFailure own = failure_of(leader, kTooMany);
  waits.join();
  EXPECT_EQ(own.code, ErrorCode::resource_exhausted);
  EXPECT_EQ(own.process, CallFailure::kNone);
  expect_in("this process could not create 1099511627780 KiB of shared memory in /dev/shm", own.text);
  expect_in("No space left on device. /dev/shm has ", own.text);
  EXPECT_EQ(heard.code, ErrorCode::resource_exhausted);
  EXPECT_EQ(heard.kind, CallFailure::Kind::resources);
  EXPECT_EQ(heard.process, 0);
  expect_in("process 0 could not create 1099511627780 KiB of shared memory", heard.text);
  EXPECT_FALSE(exists(".failure-0-1"));
  EXPECT_TRUE(exists(".failure-0-2"));
  EXPECT_EQ(failure_of(late, kTooMany).code, ErrorCode::resource_exhausted);
  leader.clean_up(kNever);  // returns at once: all have read
  EXPECT_FALSE(exists(".failure-0-2"));
  EXPECT_FALSE(exists());
}

TEST_F(SharedMemoryTest, AllHearThatThereIsNoFileDescriptor) {
  SharedMemory leader = of(2, 0), other = of(2, 1);
  CallFailure own;
  {
    const NoFiles limit;
    own = failure_of(leader, 100);
  }
  // heard: with the limit of the failed process
  const CallFailure heard = failure_of(other, 100);
  for (const CallFailure& failure : {own, heard}) {
    EXPECT_EQ(failure.code, ErrorCode::resource_exhausted);
    expect_in("could not create 5 KiB of shared memory in /dev/shm for a group of processes: Too many open files",
              failure.text);
    expect_in("It may have 0 files open", failure.text);
  }
}

TEST_F(SharedMemoryTest, TheFirstProcessHearsOfTheOthers) {
  SharedMemory leader = of(2, 0), other = of(2, 1);
  const Memory memory = leader.connect(100, kNever);
  EXPECT_FALSE(leader.failure_of(1).has_value());
  {
    const NoFiles limit;
    expect_in("this process could not open", error_of(other, 100));
  }
  ASSERT_TRUE(leader.failure_of(1).has_value());
  expect_in("could not open 5 KiB of shared memory", leader.failure_of(1)->text);
  expect_in("Too many open files", leader.failure_of(1)->text);
  EXPECT_FALSE(exists(".failure-1-0"));
}

// The leader may learn of it, and release the segment, before a third process comes.
TEST_F(SharedMemoryTest, ALateProcessHearsOfTheOthers) {
  SharedMemory leader = of(3, 0), other = of(3, 1), late = of(3, 2);
  leader.connect(100, kNever);  // and releases it
  {
    const NoFiles limit;
    error_of(other, 100);
  }
  expect_in("process 1 could not open 5 KiB", error_of(late, 100));
}

TEST_F(SharedMemoryTest, NotesThatNobodyReadsAreRemoved) {
  {
    SharedMemory leader = of(2, 0);
    error_of(leader, kTooMany);
    EXPECT_TRUE(exists(".failure-0-1"));
    leader.clean_up([] { return true; });
    EXPECT_FALSE(exists(".failure-0-1"));
    error_of(leader, kTooMany);
    EXPECT_TRUE(exists(".failure-0-1"));
  }
  EXPECT_FALSE(exists(".failure-0-1"));
}

TEST_F(SharedMemoryTest, LargerSegments) {
  SharedMemory leader = of(2, 0), other = of(2, 1);
  EXPECT_EQ(leader.create(1, kTooMany), nullptr);
  EXPECT_FALSE(exists("-1"));
  EXPECT_EQ(other.open(1, 1000), nullptr);
  const Memory created = leader.create(2, 1000), opened = other.open(2, 1000);
  ASSERT_NE(created, nullptr);
  ASSERT_NE(opened, nullptr);
  created.get()[999] = 7;
  EXPECT_EQ(opened.get()[999], 7);
  leader.unlink(2);
  EXPECT_FALSE(exists("-2"));
  const NoFiles limit;
  EXPECT_EQ(leader.create(3, 1000), nullptr);
}

TEST_F(SharedMemoryTest, NamesTheHostIdOfProcessesThatDoNotShareMemory) {
  SharedMemory other = of(2, 1, 0.05, "node7");
  const CallFailure failure = failure_of(other, 100);
  EXPECT_EQ(failure.code, ErrorCode::deadline_exceeded);
  EXPECT_EQ(failure.kind, CallFailure::Kind::absent);
  EXPECT_EQ(failure.process, 0);
  expect_in("JAX_RING_HOST_ID is 'node7' in both processes, so they claim to share a host", failure.text);
  expect_in("they do not share /dev/shm", failure.text);
}

}  // namespace
}  // namespace jax_ring::shm
