// handshake.cc: messages between the processes of a group, through a key-value store.
#include "cuda/groups/handshake.h"

#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/printable.h"

namespace jax_ring::gpu {
namespace {

constexpr char kError = 'E', kItems = 'I';

// kItems, then for each item its size and its bytes; or kError and a text.
std::string encode(const std::vector<std::string>& items) {
  std::string message(1, kItems);
  for (const std::string& item : items) {
    const uint32_t size = static_cast<uint32_t>(item.size());
    message.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(item);
  }
  return message;
}

std::vector<std::string> decode(const std::string& message) {
  std::vector<std::string> items;
  for (size_t at = 1; at < message.size();) {
    uint32_t size = 0;
    if (message.size() - at >= sizeof(size)) std::memcpy(&size, message.data() + at, sizeof(size));
    at += sizeof(size);
    if (at > message.size() || size > message.size() - at) {
      throw std::runtime_error("a message of " + std::to_string(message.size()) + " bytes is cut off");
    }
    items.push_back(message.substr(at, size));
    at += size;
  }
  return items;
}

}  // namespace

Handshake::Handshake(std::string name, int64_t process, std::shared_ptr<const KeyValueStore> store)
    : name_(std::move(name)), process_(process), store_(std::move(store)) {}

std::string Handshake::key(Phase phase, int64_t process) const {
  return name_ + "/attempt " + std::to_string(attempt_) + (phase == Phase::handles ? "/handles/" : "/connected/") +
         std::to_string(process);
}

// The store refuses an existing key. If it took the key but reported an error, the next try finds it there: the value,
// or why an earlier try failed, of which the others know.
void Handshake::publish(const std::string& key, const std::string& value) {
  if (store_ == nullptr || !store_->publish) {
    throw std::runtime_error("the processes of this group have no key-value store. Call jax.distributed.initialize()");
  }
  try {
    store_->publish(key, value);
  } catch (const std::exception&) {
    if (key != std::exchange(uncertain_, key)) throw;
    const std::string known = store_->fetch(key);
    if (known == value) return;
    if (!known.empty() && known[0] == kError) end_attempt(process_, known);
    throw;
  }
}

void Handshake::end_attempt(int64_t process, const std::string& message) {
  ++attempt_;
  told_.clear();
  const std::string why = message.empty() ? "without a reason" : printable(std::string_view(message).substr(1));
  throw std::runtime_error("process " + std::to_string(process) + " failed: " + why);
}

void Handshake::tell(Phase phase, const std::vector<std::string>& items) {
  if (told_.count(phase) > 0) return;
  publish(key(phase, process_), encode(items));
  told_.insert(phase);
}

void Handshake::tell_error(Phase phase, const std::string& error) noexcept {
  try {
    publish(key(phase, process_), kError + error);
  } catch (const std::exception&) {
    return;  // the others time out, and this attempt goes on at this process's next try
  }
  ++attempt_;
  told_.clear();
}

std::vector<std::string> Handshake::ask(Phase phase, int64_t process) {
  std::string message;
  try {
    message = store_->fetch(key(phase, process));
  } catch (const std::exception& error) {
    throw std::runtime_error(
        "process " + std::to_string(process) +
        (phase == Phase::handles ? " did not say where the memory of its GPUs is"
                                 : " did not say that it has mapped the memory of the other GPUs") +
        ". A process does so when it first executes a program with a collective of this group, and every process must "
        "execute it. If it is only slow, set JAX_RING_TIMEOUT_S to more seconds, or execute the program again. (" +
        error.what() + ")");
  }
  if (!message.empty() && message[0] == kItems) return decode(message);
  end_attempt(process, message);
}

}  // namespace jax_ring::gpu
