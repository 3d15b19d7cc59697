// host_backend.cc: ranks on host threads, with mailboxes in POSIX shared memory, within and between processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "check/backend.h"
#include "cuda/kernels/make_table.h"
#include "device/algorithm.h"

namespace jax_ring::check {
namespace {

class SharedMemory final : public gpu::PeerMemory {
 public:
  void* allocate(int, size_t bytes) override {
    const std::string name = "/jax_ring_check_" + std::to_string(getpid()) + "_" + std::to_string(next_.fetch_add(1));
    const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) fail("shm_open of " + name);
    return track(map(file, bytes), {name, bytes, true});
  }

  void release(int, void* memory) noexcept override { unmap(memory); }
  void* allocate_on_host(int, size_t bytes) override { return allocate(0, bytes); }
  void release_on_host(int, void* memory) noexcept override { unmap(memory); }
  bool can_access(int, int) override { return true; }
  void enable_access(int, int) override {}

  std::string export_handle(int, void* memory) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Segment& segment = segments_.at(memory);
    return std::to_string(segment.bytes) + " " + segment.name;
  }

  void* import_handle(int, const std::string& handle) override {
    const size_t space = handle.find(' ');
    const size_t bytes = std::stoull(handle.substr(0, space));
    const std::string name = handle.substr(space + 1);
    const int file = shm_open(name.c_str(), O_RDWR, 0600);
    if (file < 0) fail("shm_open of " + name);
    return track(map(file, bytes), {name, bytes, false});
  }

  void close_handle(int, void* memory) noexcept override { unmap(memory); }
  void warm_up(int) override {}

 private:
  struct Segment {
    std::string name;
    size_t bytes;
    bool owned;
  };

  [[noreturn]] static void fail(const std::string& what) {
    throw std::runtime_error(what + ": " + std::strerror(errno));
  }

  static void* map(int file, size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) fail("mmap");
    return memory;
  }

  void* track(void* memory, Segment segment) {
    std::lock_guard<std::mutex> lock(mutex_);
    segments_[memory] = std::move(segment);
    return memory;
  }

  void unmap(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = segments_.find(memory);
    if (found == segments_.end()) return;
    munmap(memory, found->second.bytes);
    if (found->second.owned) shm_unlink(found->second.name.c_str());
    segments_.erase(found);
  }

  static std::atomic<int> next_;
  std::mutex mutex_;
  std::map<void*, Segment> segments_;
};

std::atomic<int> SharedMemory::next_{0};

// Several, so that a dry run also takes the paths of a team.
constexpr int kThreadsPerTeam = 2;

using Kernel = void (*)(const gpu::Call& call, int cta, HostTeam team);

template <class Element, class Operation, Algorithm kAlgorithm>
struct OnHostThreads {
  static void kernel(const gpu::Call& call, int cta, HostTeam team) {
    run_team<Element, Operation, kAlgorithm>(call.self, call.message, call.plan, cta, team);
  }
  static void along_tree(const gpu::Call& call, int cta, HostTeam team) {
    run_team<Element, Operation, kAlgorithm>(call.self, call.message, call.plan, cta, team, TreeTerms{call.tree});
  }
};

Kernel kernel_of(const gpu::KernelKey& key) {
#define JAX_RING_TABLE(name, element) gpu::table_of<Kernel, OnHostThreads, element>(),
  static constexpr gpu::TableOf<Kernel> kTables[] = {JAX_RING_FOR_EACH_DTYPE(JAX_RING_TABLE)};
#undef JAX_RING_TABLE
  return kTables[static_cast<int>(key.dtype)].of(key);
}

class HostBackend final : public Backend {
 public:
  gpu::PeerMemory& memory() override { return memory_; }
  void copy_in(void* to, const void* from_host, size_t bytes) override { std::memcpy(to, from_host, bytes); }
  void copy_out(void* to_host, const void* from, size_t bytes) override { std::memcpy(to_host, from, bytes); }

  // The threads of all ranks make progress, however many there are.
  int resident_ctas(int) override { return std::numeric_limits<int>::max(); }
  bool has_kernels(DType) override { return true; }

  // All launch modes are the same here.
  double run(const std::vector<Work>& ranks, LaunchMode, int repeats) override {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    std::deque<HostBarrier> barriers;
    for (const Work& work : ranks) {
      if (work.launches.empty()) continue;
      for (int cta = 0; cta < work.launches[0].call.self.capacity.num_ctas; ++cta) {
        HostBarrier& barrier = barriers.emplace_back(kThreadsPerTeam);
        for (int thread = 0; thread < kThreadsPerTeam; ++thread) {
          threads.emplace_back([&work, cta, repeats, team = HostTeam{&barrier, thread}] {
            for (int i = 0; i < repeats; ++i) {
              for (const gpu::Launch& launch : work.launches) {
                kernel_of(launch.kernel)(launch.call, cta, team);
                team.sync();  // the end of a kernel
              }
            }
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  double copy_seconds(int, size_t bytes, int repeats) override {
    const std::vector<char> from(bytes, 1);
    std::vector<char> to(bytes);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) std::memcpy(to.data(), from.data(), bytes);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  SharedMemory memory_;
};

}  // namespace

std::unique_ptr<Backend> host_backend() { return std::make_unique<HostBackend>(); }

}  // namespace jax_ring::check
