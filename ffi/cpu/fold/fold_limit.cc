// fold_limit.cc: times the fold kernel on plain threads.
#include "cpu/fold/fold_limit.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/fold/fold_kernels.h"

namespace jax_ring::cpu {
namespace {

constexpr size_t kPage = 4096;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer make_buffer(size_t num_bytes) {
  const size_t whole_pages = (num_bytes + kPage - 1) / kPage * kPage;
  Buffer buffer(std::aligned_alloc(kPage, whole_pages));
  if (buffer == nullptr) throw std::bad_alloc();
  std::memset(buffer.get(), 0, whole_pages);  // touches every page
  return buffer;
}

}  // namespace

double fold_limit_seconds(int num_ranks, size_t num_bytes, int num_threads, int repeats, DType dtype) {
  if (num_ranks < 1 || num_threads < 1) throw std::invalid_argument("a fold needs a rank and a thread");
  std::vector<Buffer> buffers;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int rank = 0; rank < num_ranks; ++rank) {
    buffers.push_back(make_buffer(num_bytes));
    inputs.push_back(buffers.back().get());
    outputs.push_back(buffers.back().get());
  }
  const size_t count = num_bytes / element_size(dtype);
  const size_t line = 64 / element_size(dtype);
  const size_t share = (count / num_threads + line - 1) / line * line;
  const FoldKernel kernel = fold_kernels().get(Op::sum, dtype);
  // Repeat small folds within a measurement, so that the cost of starting threads is negligible.
  const int times = static_cast<int>(std::clamp<size_t>((size_t{32} << 20) / std::max<size_t>(num_bytes, 1), 1, 20000));
  const auto fold_share = [&](int thread) {
    const size_t begin = std::min(thread * share, count);
    for (int i = 0; i < times; ++i) {
      kernel({inputs.data(), num_ranks, begin}, {outputs.data(), num_ranks, begin}, std::min(share, count - begin),
             /*streaming=*/false);
    }
  };

  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(fold_share, thread);
    fold_share(0);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    least = std::min(least, elapsed.count() / times);
  }
  return least;
}

}  // namespace jax_ring::cpu
