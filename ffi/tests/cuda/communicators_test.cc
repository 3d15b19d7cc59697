// communicators_test.cc: all groups of a process, and its GPUs' ids.
#include "cuda/groups/communicators.h"

#include <gtest/gtest.h>

#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/host_groups.h"

namespace jax_ring::gpu {
namespace {

// A process. A test has several.
struct Process {
  HostMemory memory;
  Communicators all;

  explicit Process(Table& table, int64_t id) {
    all.set_gpus(&memory);
    all.set_deadline(kSeconds);
    all.set_process(id, table.store());
  }
  std::shared_ptr<Communicator> connect(const std::vector<Member>& members) {
    const std::shared_ptr<Communicator> communicator = all.get_or_create(members);
    all.connect(*communicator, 0);
    return communicator;
  }
};

// Runs an action for both processes at the same time.
void in_both(Process& a, Process& b, const std::function<void(Process&)>& action) {
  std::thread other([&] { action(b); });
  action(a);
  other.join();
}

const std::vector<Member> kPair = {{0, 0}, {1, 1}};

TEST(Communicators, AWaitBlocksNothingElse) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  std::promise<void> fetching, go_on;
  std::string error;
  all.set_process(0, {[](const std::string&, const std::string&) {},
                      [&](const std::string& key) -> std::string {
                        fetching.set_value();
                        go_on.get_future().wait();
                        throw std::runtime_error("no " + key);
                      }});
  std::thread connecting([&] { error = error_of([&] { all.connect(*all.get_or_create(kPair), 0); }); });
  fetching.get_future().wait();
  // While it waits for the other process, executions, compilations and Python go on in other threads.
  auto rest = std::async(std::launch::async, [&] {
    all.set_deadline(7);
    const double deadline = all.deadline();
    const std::shared_ptr<Communicator> other = all.get_or_create({{0, 2}, {0, 3}});
    all.connect(*other, 0);
    all.device_ids().id_of(0);
    all.process();
    return deadline == 7 && other->is_connected(0) && all.failures().empty() && all.unreported_failures().empty();
  });
  ASSERT_EQ(rest.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held while waiting";
  EXPECT_TRUE(rest.get());
  auto forgetting = std::async(std::launch::async, [&] { all.reset(); });
  ASSERT_EQ(forgetting.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held while waiting";
  go_on.set_value();
  connecting.join();
  EXPECT_CONTAINS(error, "the group was forgotten");
}

TEST(Communicators, ForgettingClosesAndTheNextGroupFrees) {
  Table table;
  Process a(table, 0), b(table, 1);
  in_both(a, b, [](Process& each) { each.connect(kPair); });
  const std::shared_ptr<Communicator> old = a.all.get_or_create(kPair);
  const size_t of_one_group = a.memory.allocated();
  a.all.reset();
  EXPECT_TRUE(old->is_retired());
  EXPECT_EQ(a.memory.imported, 0);
  // The other process may not have forgotten its groups yet, so its kernels may write to this one's mailbox.
  EXPECT_EQ(a.memory.allocated(), 1u);
  b.all.reset();
  in_both(a, b, [](Process& each) { each.connect(kPair); });
  EXPECT_NE(a.all.get_or_create(kPair), old);
  // Now it has. But freeing waits for a GPU, so it must wait until no program is running.
  EXPECT_EQ(a.memory.allocated(), of_one_group + 1);
  a.all.reset();
  EXPECT_EQ(a.memory.allocated(), 1u);
}

TEST(Communicators, ANewRuntimeForgetsTheGroupsOfTheOldOne) {
  Table before, after;
  Process a(before, 0);
  auto b = std::make_unique<Process>(before, 1);
  auto client = std::make_shared<int>();  // of the old runtime
  KeyValueStore with_client = before.store();
  with_client.publish = [client, publish = with_client.publish](const std::string& key, const std::string& value) {
    publish(key, value);
  };
  a.all.set_process(0, std::exchange(with_client, {}));
  in_both(a, *b, [](Process& each) { each.connect(kPair); });
  const std::shared_ptr<Communicator> old = a.all.get_or_create(kPair);
  a.all.set_process(0, after.store());
  EXPECT_TRUE(old->is_retired());
  EXPECT_EQ(client.use_count(), 1);
  EXPECT_EQ(a.memory.imported, 0);
  EXPECT_NE(a.all.get_or_create(kPair), old);
  Process c(after, 1);
  in_both(a, c, [](Process& each) { each.connect(kPair); });
  b->all.reset();
}

TEST(Communicators, AnUnknownMemberLeavesNothingBehind) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  std::map<int, int64_t> ids = {{0, 10}};
  all.device_ids().set([&] { return ids; });
  EXPECT_EQ(all.device_ids().id_of(0), 10);
  for (int i = 0; i < 2; ++i) {
    EXPECT_CONTAINS(error_of([&] { all.get_or_create({{0, 10}, {0, 11}}); }), "compiled for GPU 11 of process 0");
  }
  ids = {{0, 10}, {1, 11}};
  EXPECT_EQ(all.device_ids().id_of(1), 11);
  EXPECT_EQ(all.get_or_create({{0, 10}, {0, 11}})->rank_of(1), 1);
}

TEST(Communicators, WithoutKernels) {
  Communicators all;
  EXPECT_CONTAINS(error_of([&] { all.get_or_create(one_process(2)); }), "no GPU kernels");
}

TEST(Communicators, ReportsAFailureOnce) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  all.set_deadline(3);
  const std::shared_ptr<Communicator> communicator = all.get_or_create(one_process(2));
  all.connect(*communicator, 1);
  communicator->name_call(77, "psum of x, called at train.py:1");
  EXPECT_TRUE(all.unreported_failures().empty());
  *communicator->endpoint(1, 1, 77, 3).failure = {static_cast<uint32_t>(FailureKind::timeout), 0, 1, 0, 5, 77, 0};
  EXPECT_EQ(all.failures().size(), 1u);
  const std::vector<std::string> texts = all.unreported_failures();
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_CONTAINS(texts[0], "psum of x, called at train.py:1: rank 1 (GPU 1 of process 0) waited 3 s for rank 0");
  EXPECT_TRUE(all.unreported_failures().empty());
  EXPECT_EQ(all.failures().size(), 1u);
  all.reset();
  EXPECT_TRUE(all.failures().empty());
}

TEST(DeviceIds, AsksWithoutALockAndRemembers) {
  DeviceIds ids;
  EXPECT_EQ(ids.id_of(5), 5);
  EXPECT_TRUE(ids.ordinals().empty());
  int asked = 0;
  ids.set([&] {
    ++asked;
    // Things that another thread may do meanwhile.
    auto other = std::async(std::launch::async, [&] { return ids.ordinals().size(); });
    EXPECT_EQ(other.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held";
    return std::map<int, int64_t>{{0, 8}, {1, 9}};
  });
  EXPECT_EQ(ids.id_of(1), 9);
  EXPECT_EQ(ids.id_of(0), 8);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(ids.ordinals(), (std::map<int64_t, int>{{8, 0}, {9, 1}}));
  EXPECT_CONTAINS(error_of([&] { ids.id_of(2); }),
                  "CUDA ordinal 2, and JAX lists in this process those with the "
                  "ordinals 0, 1");
  ids.forget();
  asked = 0;
  EXPECT_EQ(ids.id_of(0), 8);
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace jax_ring::gpu
