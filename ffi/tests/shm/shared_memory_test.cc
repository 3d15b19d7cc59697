// shared_memory_test.cc: the names of segments, and everyone's error if one process cannot map them.
#include "shm/memory/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/call_failure.h"

namespace jax_ring::shm {
namespace {

constexpr size_t kTooMany = size_t{1} << 50;  // bytes
constexpr double kDeadline = 30;              // seconds; no test waits so long

constexpr char kKey[] = "0123456789abcdef";
const Segments::Stop kNever = [] { return false; };

// A group's processes, in this one.
class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() : names_("test-" + std::to_string(getpid()), kKey, {next_++}) {}

  SharedMemory of(int num_processes, int self, double seconds = kDeadline, std::string host_id = "") const {
    std::vector<int64_t> processes;
    for (int process = 0; process < num_processes; ++process) processes.push_back(process);
    return SharedMemory(names_, std::move(processes), self, [seconds] { return seconds; }, std::move(host_id));
  }
  static bool exists(const std::string& name) {
    struct stat status;
    return lstat(("/dev/shm" + name).c_str(), &status) == 0;
  }
  bool has_segment(uint32_t number = 0) const { return exists(names_.segment(number)); }
  bool has_note(int from, int to) const { return exists(names_.note(from, to)); }

  const Names names_;

 private:
  static inline int64_t next_ = 0;
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
  EXPECT_FALSE(has_segment());
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
  ASSERT_EQ(stat(("/dev/shm" + names_.segment(0)).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(status.st_uid, geteuid());
  second.reset();  // the first one to release it unlinks the name
  EXPECT_FALSE(has_segment());
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
  EXPECT_FALSE(has_note(0, 1));
  EXPECT_TRUE(has_note(0, 2));
  EXPECT_EQ(failure_of(late, kTooMany).code, ErrorCode::resource_exhausted);
  leader.clean_up(kNever);  // returns at once: all have read
  EXPECT_FALSE(has_note(0, 2));
  EXPECT_FALSE(has_segment());
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
  EXPECT_FALSE(has_note(1, 0));
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
    EXPECT_TRUE(has_note(0, 1));
    leader.clean_up([] { return true; });
    EXPECT_FALSE(has_note(0, 1));
    error_of(leader, kTooMany);
    EXPECT_TRUE(has_note(0, 1));
  }
  EXPECT_FALSE(has_note(0, 1));
}

TEST_F(SharedMemoryTest, LargerSegments) {
  SharedMemory leader = of(2, 0), other = of(2, 1);
  EXPECT_EQ(leader.create(1, kTooMany), nullptr);
  EXPECT_FALSE(has_segment(1));
  EXPECT_EQ(other.open(1, 1000), nullptr);
  const Memory created = leader.create(2, 1000), opened = other.open(2, 1000);
  ASSERT_NE(created, nullptr);
  ASSERT_NE(opened, nullptr);
  created.get()[999] = 7;
  EXPECT_EQ(opened.get()[999], 7);
  leader.unlink(2);
  EXPECT_FALSE(has_segment(2));
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

// Whoever sees one name could take another that it can work out, before its owner does.
TEST(NamesTest, HaveNothingInCommonButTheLabel) {
  const std::string beginning = "/jax_ring-label-";
  const auto names_with = [](const std::string& key) {
    std::vector<std::string> all;
    for (const std::vector<int64_t>& group : {std::vector<int64_t>{0, 1}, {0, 1, 2}, {1, 0}}) {
      const Names names("label", key, group);
      for (uint32_t number = 0; number < 10; ++number) all.push_back(names.segment(number));
      for (int from : {0, 1, 2}) {
        for (int to : {0, 1, 2}) all.push_back(names.note(from, to));
      }
    }
    return all;
  };
  const std::string key = kKey, other = "0123456789abcdeg";
  std::set<std::string> ends;
  for (const std::vector<std::string>& names : {names_with(key), names_with(other)}) {
    for (const std::string& name : names) {
      ASSERT_EQ(name.rfind(beginning, 0), 0u) << name;
      EXPECT_EQ(name.size(), beginning.size() + 16) << name;
      EXPECT_EQ(name.find(key), std::string::npos) << name;
      // Half of it is not that of another name either.
      EXPECT_TRUE(ends.insert(name.substr(beginning.size(), 8)).second) << name;
      EXPECT_TRUE(ends.insert(name.substr(beginning.size() + 8)).second) << name;
    }
  }
  EXPECT_EQ(names_with(key), names_with(key));
}

// The vectors of its authors, for the key 00 01 ... 0f: https://github.com/veorq/SipHash/blob/master/vectors.h.
TEST(SipHashTest, HasTheValuesOfItsAuthors) {
  std::string key, bytes;
  for (char next = 0; next < 16; ++next) key.push_back(next);
  const SipHash hash(key);
  const uint64_t expected[] = {0x726fdb47dd0e0e31, 0x74f839c593dc67fd, 0x0d6c8009d9a94f5a, 0x85676696d7fb7e2d};
  for (char next = 0; next < 4; ++next) {
    EXPECT_EQ(hash(bytes), expected[static_cast<int>(next)]) << bytes.size() << " bytes";
    bytes.push_back(next);
  }
  for (char next = 4; next < 15; ++next) bytes.push_back(next);
  EXPECT_EQ(hash(bytes), 0xa129ca6149be45e5) << "the example of the paper";
  EXPECT_THROW(SipHash("a short key"), std::invalid_argument);
}

}  // namespace
}  // namespace jax_ring::shm
