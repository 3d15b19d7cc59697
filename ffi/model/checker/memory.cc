// memory.cc: reads, stores and fences under release-acquire semantics, and data races by vector clocks.
#include "model/checker/memory.h"

#include <cstring>
#include <sstream>

namespace jax_ring::model {
namespace {

constexpr uintptr_t kCellBytes = 8;

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst || order == std::memory_order_consume;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

}  // namespace

void Memory::clear() {
  locations_.clear();
  by_address_.clear();
  cells_.clear();
  names_.clear();
  sc_ = {};
}

void Memory::name(const void* at, size_t bytes, const std::string& text) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  names_.push_back({begin, begin + bytes, text});
}

std::string Memory::describe(uintptr_t address) const {
  std::ostringstream text;
  for (const Name& name : names_) {
    if (address < name.begin || address >= name.end) continue;
    text << name.text << " + " << address - name.begin;
    return text.str();
  }
  text << "0x" << std::hex << address;
  return text.str();
}

size_t Memory::location(const void* at, int bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  const auto [found, is_new] = by_address_.try_emplace(address, locations_.size());
  if (is_new) {
    uint64_t value = 0;
    std::memcpy(&value, at, bytes);
    locations_.push_back({address, bytes, {}, {}});
    locations_.back().messages.push_back({value, {}, nullptr});
  }
  return found->second;
}

uint64_t Memory::read(ThreadMemory& thread, size_t location, uint32_t message, std::memory_order order) {
  const Message& read = locations_[location].messages[message];
  thread.own.view.raise(location, message);
  thread.cause.join(read.cause);
  if (read.carried != nullptr) {
    if (acquires(order)) {
      thread.own.join(*read.carried);
    } else {
      thread.unacquired.join(*read.carried);
    }
  }
  return read.value;
}

void Memory::append(ThreadMemory& thread, int index, size_t at, uint64_t value, std::memory_order order,
                    const Message* previous) {
  Location& location = locations_[at];
  const uint32_t message = static_cast<uint32_t>(location.messages.size());
  thread.own.view.raise(at, message);
  SharedKnowledge carried = releases(order) ? std::make_shared<Knowledge>(thread.own) : thread.released;
  // A release sequence continues through read-modify-writes.
  if (previous != nullptr && previous->carried != nullptr) {
    Knowledge both = *previous->carried;
    if (carried != nullptr) both.join(*carried);
    carried = std::make_shared<Knowledge>(std::move(both));
  }
  location.messages.push_back({value, thread.cause, std::move(carried)});
  location.writer = index;
  if (order == std::memory_order_seq_cst) location.latest_sc = message;
  // The memory itself holds the latest value, for checks after the threads have ended.
  std::memcpy(reinterpret_cast<void*>(location.address), &value, location.bytes);
}

void Memory::fence(ThreadMemory& thread, std::memory_order order) {
  if (acquires(order)) thread.own.join(thread.unacquired);
  if (order == std::memory_order_seq_cst) {
    thread.own.join(sc_);
    for (size_t i = 0; i < locations_.size(); ++i) thread.own.view.raise(i, locations_[i].latest_sc);
    // The fence tells later fences what this thread can no longer miss. It creates no edge of happens-before.
    sc_.view.join(thread.own.view);
  }
  if (releases(order)) thread.released = std::make_shared<Knowledge>(thread.own);
}

void Memory::see_latest(ThreadMemory& thread) {
  for (size_t i = 0; i < locations_.size(); ++i) {
    thread.own.view.raise(i, static_cast<uint32_t>(locations_[i].messages.size()) - 1);
  }
}

std::string Memory::plain_read(const ThreadMemory& thread, int index, const void* at, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at) / kCellBytes;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + bytes + kCellBytes - 1) / kCellBytes;
  for (uintptr_t i = begin; i < end; ++i) {
    Cell& cell = cells_[i];
    if (cell.writer >= 0 && cell.writer != index && thread.own.happened.at[cell.writer] < cell.written) {
      return "a read of " + describe(i * kCellBytes) + ", which thread " + std::to_string(cell.writer) + " writes";
    }
    cell.reads.at[index] = thread.own.happened.at[index];
  }
  return {};
}

std::string Memory::plain_write(const ThreadMemory& thread, int index, const void* at, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at) / kCellBytes;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + bytes + kCellBytes - 1) / kCellBytes;
  for (uintptr_t i = begin; i < end; ++i) {
    Cell& cell = cells_[i];
    if (cell.writer >= 0 && cell.writer != index && thread.own.happened.at[cell.writer] < cell.written) {
      return "a write of " + describe(i * kCellBytes) + ", which thread " + std::to_string(cell.writer) + " writes";
    }
    for (int other = 0; other < kMaxThreads; ++other) {
      if (other == index || cell.reads.at[other] <= thread.own.happened.at[other]) continue;
      return "a write of " + describe(i * kCellBytes) + ", which thread " + std::to_string(other) + " reads";
    }
    cell.writer = index;
    cell.written = thread.own.happened.at[index];
  }
  return {};
}

}  // namespace jax_ring::model
