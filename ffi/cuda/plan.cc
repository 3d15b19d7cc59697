// plan.cc: packs operands into messages, and chooses their algorithm.
#include "cuda/plan.h"

#include <algorithm>

namespace jax_ring::gpu {
namespace {

// FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv/. Alike in all processes, unlike std::hash.
class Hash {
 public:
  Hash& add(const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) value_ = (value_ ^ static_cast<const unsigned char*>(data)[i]) * 16777619u;
    return *this;
  }
  template <class T>
  Hash& add(const T& value) {
    return add(&value, sizeof(value));
  }
  uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 2166136261u;
};

}  // namespace

uint32_t CallSite::fingerprint() const { return Hash().add(call.data(), call.size()).value(); }

std::vector<Launch> plan(const Communicator& communicator, int rank, const CallSite& site, DType dtype,
                         const std::vector<Buffer>& buffers, double deadline_seconds) {
  // The blocks of a ring are those of an operand, so that there each operand is a message of its own.
  const size_t most = site.order == Order::ring ? 1 : kMaxOperands;
  std::vector<Launch> launches;
  for (size_t first = 0; first < buffers.size(); first += most) {
    Launch launch{};
    Message& message = launch.call.message;
    uint64_t bytes = 0;
    for (size_t i = first; i < std::min(first + most, buffers.size()); ++i) {
      const Buffer& buffer = buffers[i];
      if (buffer.bytes == 0) continue;
      message.operands[message.num_operands++] = {static_cast<const unsigned char*>(buffer.input),
                                                  static_cast<unsigned char*>(buffer.output), buffer.bytes,
                                                  message.num_packs};
      message.num_packs += ceil_div(buffer.bytes, kPackBytes);
      bytes += buffer.bytes;
    }
    if (message.num_packs == 0) continue;
    launch.algorithm = site.algorithm.value_or(choose(bytes, communicator.num_ranks(), site.order));
    launch.call.order = site.order;
    launch.call.self = communicator.endpoint(rank, site.lane(), site.fingerprint(), deadline_seconds);
    message.fingerprint = Hash()
                              .add(site.fingerprint())
                              .add(dtype)
                              .add(launch.algorithm)
                              .add(site.order)
                              .add(static_cast<uint64_t>(first))
                              .add(bytes)
                              .value();
    launches.push_back(launch);
  }
  return launches;
}

}  // namespace jax_ring::gpu
