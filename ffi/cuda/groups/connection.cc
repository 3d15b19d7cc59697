// connection.cc: allocates mailboxes, exchanges their handles, and maps those of other processes.
#include "cuda/groups/connection.h"

#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/printable.h"
#include "cuda/groups/deadline.h"

namespace jax_ring::gpu {
namespace {

size_t progress_bytes(const Capacity& capacity) { return capacity.num_ctas * sizeof(Progress); }

constexpr char kForgotten[] =
    "the group was forgotten (by jax_ring.runtime.forget_gpu_groups(), or since jax.distributed was initialized "
    "again) after this program was compiled. Call jax.clear_caches(), so that it is compiled again";

}  // namespace

Connection::Connection(const Group& group, int lane, PeerMemory& memory, std::shared_ptr<const KeyValueStore> store)
    : group_(group),
      memory_(memory),
      handshake_(std::in_place, group.name + "/lane " + std::to_string(lane), group.process, std::move(store)) {
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    if (!group.is_local(rank)) continue;
    LocalRank local;
    local.rank = rank;
    local.ordinal = group.ordinal(rank);
    local.mailboxes.resize(group.num_ranks());
    local.imported.resize(group.num_ranks());
    local_.push_back(std::move(local));
  }
}

Connection::~Connection() {
  close();
  free_all();
}

// ---- Connecting -----------------------------------------------------------------------------------------------------

void Connection::connect(double deadline_seconds) {
  if (is_connected()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::connecting) {
    // The other thread waits up to the deadline for each process, so wait longer here: its error says more.
    const uint64_t before = num_tries_;
    if (!changed_.wait_for(lock, duration_of(2 * deadline_seconds), [&] { return num_tries_ != before; })) {
      throw std::runtime_error("another GPU of this process has been connecting the group for " +
                               std::to_string(2 * deadline_seconds) +
                               " s. Set JAX_RING_TIMEOUT_S to more seconds if it is only slow");
    }
    if (!error_.empty()) throw std::runtime_error(error_);
  }
  if (state_ == State::connected) return;
  if (state_ == State::closed) throw std::runtime_error(kForgotten);
  state_ = State::connecting;
  lock.unlock();
  std::string error;
  try {
    try_to_connect();
  } catch (const std::exception& failed) {
    error = failed.what();
  }
  lock.lock();
  ++num_tries_;
  if (should_close_) error = kForgotten;
  error_ = error;
  state_ = should_close_ ? State::closed : error.empty() ? State::connected : State::idle;
  connected_.store(state_ == State::connected, std::memory_order_release);
  const bool closed = state_ == State::closed;
  lock.unlock();
  changed_.notify_all();
  if (closed) release();
  if (!error.empty()) throw std::runtime_error(error);
}

std::vector<int64_t> Connection::other_processes() const {
  std::set<int64_t> others;
  for (const Member& member : group_.members) {
    if (member.process != group_.process) others.insert(member.process);
  }
  return {others.begin(), others.end()};
}

std::vector<int> Connection::ordinals() const {
  std::vector<int> all;
  for (const LocalRank& local : local_) all.push_back(local.ordinal);
  return all;
}

void Connection::try_to_connect() {
  const std::vector<int64_t> others = other_processes();
  std::vector<std::string> own = {std::to_string(group_.capacity.bytes())};
  try {
    if (group_.multicasts && multicast_.all == nullptr) set_up_multicast();
    for (LocalRank& local : local_) {
      set_up(local, !others.empty());
      own.push_back(local.handle);
    }
  } catch (const std::exception& error) {
    if (!others.empty()) handshake_->tell_error(Phase::handles, error.what());
    throw;
  }
  if (!others.empty()) handshake_->tell(Phase::handles, own);

  std::map<int64_t, std::vector<std::string>> theirs;
  for (int64_t process : others) theirs[process] = handshake_->ask(Phase::handles, process);
  try {
    std::map<int64_t, size_t> next;
    for (int peer = 0; peer < group_.num_ranks(); ++peer) {
      if (group_.is_local(peer)) continue;
      const int64_t process = group_.members[peer].process;
      const std::vector<std::string>& items = theirs[process];
      if (items.empty() || items[0] != own[0] || ++next[process] >= items.size()) {
        throw std::runtime_error("processes " + std::to_string(group_.process) + " and " + std::to_string(process) +
                                 " run different versions of jax_ring: their mailboxes have " + own[0] + " and " +
                                 (items.empty() ? "no" : printable(items[0])) + " bytes");
      }
      for (LocalRank& local : local_) import(local, peer, items[next[process]]);
    }
    map_peers();
  } catch (const std::exception& error) {
    if (!others.empty()) handshake_->tell_error(Phase::connected, error.what());
    throw;
  }
  if (others.empty()) return;
  // Launch only when all are ready: an error reaches all processes, and no kernel's deadline runs meanwhile.
  handshake_->tell(Phase::connected, {});
  for (int64_t process : others) handshake_->ask(Phase::connected, process);
}

// One allocation for all mailboxes. Other processes would need its file descriptors, and a key-value store cannot pass
// these on.
void Connection::set_up_multicast() {
  const auto refuse = [&](const std::string& why) {
    std::string names;
    for (const Member& member : group_.members) names += (names.empty() ? "" : ", ") + name_of(member);
    throw std::runtime_error("JAX_RING_MULTICAST=1 asks for multicast memory for " + names + ": " + why +
                             ". Unset JAX_RING_MULTICAST in all processes");
  };
  if (!other_processes().empty()) refuse("it is there only for GPUs of one process");
  const std::vector<int> devices = ordinals();
  if (const std::string why = memory_.why_no_multicast(devices); !why.empty()) refuse(why);
  try {
    for (int device : devices) memory_.warm_up(device);
    multicast_ = memory_.allocate_multicast(devices, group_.capacity.bytes());
  } catch (const std::exception& error) {
    refuse(error.what());
  }
  for (size_t i = 0; i < local_.size(); ++i) {
    local_[i].mailboxes[local_[i].rank] = static_cast<unsigned char*>(multicast_.parts[i]);
  }
}

void Connection::set_up(LocalRank& local, bool exports) {
  const std::string name = name_of(group_.members[local.rank]);
  try {
    unsigned char*& mailbox = local.mailboxes[local.rank];
    if (mailbox == nullptr) {
      memory_.warm_up(local.ordinal);
      mailbox = static_cast<unsigned char*>(memory_.allocate(local.ordinal, group_.capacity.bytes()));
    }
    if (local.counters == nullptr) {
      const size_t bytes = progress_bytes(group_.capacity) + sizeof(uint32_t);
      local.counters = static_cast<unsigned char*>(memory_.allocate(local.ordinal, bytes));
    }
    if (local.failure == nullptr) {
      local.failure = static_cast<Failure*>(memory_.allocate_on_host(local.ordinal, sizeof(Failure)));
    }
    if (exports && local.handle.empty()) local.handle = memory_.export_handle(local.ordinal, mailbox);
  } catch (const std::exception& error) {
    throw std::runtime_error(name + " could not set up its mailbox of " + std::to_string(group_.capacity.bytes()) +
                             " bytes: " + error.what() +
                             ". If memory is short: JAX takes three quarters of each GPU's, or what "
                             "XLA_PYTHON_CLIENT_MEM_FRACTION says");
  }
}

void Connection::map_peers() {
  for (LocalRank& local : local_) {
    for (const LocalRank& peer : local_) {
      if (peer.rank == local.rank) continue;
      const std::string names =
          name_of(group_.members[local.rank]) + " cannot access the memory of " + name_of(group_.members[peer.rank]);
      if (!memory_.can_access(local.ordinal, peer.ordinal)) {
        throw std::runtime_error(names +
                                 ": CUDA reports no peer access between them (nvidia-smi topo -p2p r shows "
                                 "which GPUs have it). Use GPUs that have, or lax.psum for this group");
      }
      try {
        memory_.enable_access(local.ordinal, peer.ordinal);
      } catch (const std::exception& error) {
        throw std::runtime_error(names + ": " + error.what() + ". Use other GPUs, or lax.psum for this group");
      }
      local.mailboxes[peer.rank] = peer.mailboxes[peer.rank];
    }
  }
}

void Connection::import(LocalRank& local, int peer, const std::string& handle) {
  if (local.mailboxes[peer] != nullptr && local.imported[peer] == handle) return;
  if (local.mailboxes[peer] != nullptr) memory_.close_handle(local.ordinal, local.mailboxes[peer]);
  local.mailboxes[peer] = nullptr;
  try {
    local.mailboxes[peer] = static_cast<unsigned char*>(memory_.import_handle(local.ordinal, handle));
  } catch (const std::exception& error) {
    throw std::runtime_error(
        name_of(group_.members[local.rank]) + " cannot map the memory of " + name_of(group_.members[peer]) + ": " +
        error.what() +
        ". Both must be GPUs of one host with peer access to each other (nvidia-smi topo -p2p r), not MIG instances, "
        "and containers must share their IPC namespace. Otherwise use lax.psum for this group");
  }
  local.imported[peer] = handle;
}

// ---- Use ------------------------------------------------------------------------------------------------------------

Endpoint Connection::endpoint(int rank, uint32_t call, double deadline_seconds) const {
  if (!is_connected()) throw std::logic_error("the group is not connected");
  for (const LocalRank& local : local_) {
    if (local.rank != rank) continue;
    Endpoint self{};
    self.capacity = group_.capacity;
    self.rank = rank;
    self.call = call;
    for (int peer = 0; peer < group_.num_ranks(); ++peer) self.mailbox[peer] = local.mailboxes[peer];
    self.multicast = static_cast<unsigned char*>(multicast_.all);
    self.progress = reinterpret_cast<Progress*>(local.counters);
    self.failed = reinterpret_cast<uint32_t*>(local.counters + progress_bytes(group_.capacity));
    self.failure = local.failure;
    self.deadline_ns = static_cast<uint64_t>(duration_of(deadline_seconds).count());
    return self;
  }
  throw std::out_of_range("rank " + std::to_string(rank) + " is not of this process");
}

std::optional<Failure> Connection::failure() const {
  if (!is_connected()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(records_mutex_);
  for (const LocalRank& local : local_) {
    if (local.failure == nullptr) continue;  // closed meanwhile
    // The GPU writes this field last.
    const uint32_t kind = __atomic_load_n(&local.failure->kind, __ATOMIC_ACQUIRE);
    if (kind != static_cast<uint32_t>(FailureKind::none)) return *local.failure;
  }
  return std::nullopt;
}

// ---- The end --------------------------------------------------------------------------------------------------------

void Connection::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    should_close_ = true;
    // The connecting thread releases everything when it is done.
    if (state_ == State::connecting || state_ == State::closed) return;
    state_ = State::closed;
    connected_.store(false, std::memory_order_release);
  }
  release();
}

// Posts outlive calls: a rank posts to its peers last, and may return before a peer's kernel has looked. So free no
// memory before all kernels that write to it are done.
void Connection::release() noexcept {
  handshake_.reset();  // the store of a runtime that was left keeps the runtime's client
  // All local ranks first: freeing waits for the device, so no kernel of this process writes to any peer afterwards.
  for (LocalRank& local : local_) {
    if (local.counters != nullptr) memory_.release(local.ordinal, std::exchange(local.counters, nullptr));
  }
  const bool alone = other_processes().empty();
  if (multicast_.all != nullptr) {
    for (LocalRank& local : local_) local.mailboxes[local.rank] = nullptr;
    memory_.release_multicast(ordinals(), std::exchange(multicast_, {}));
  }
  for (LocalRank& local : local_) {
    for (int peer = 0; peer < group_.num_ranks(); ++peer) {
      if (group_.is_local(peer) || local.mailboxes[peer] == nullptr) continue;
      memory_.close_handle(local.ordinal, std::exchange(local.mailboxes[peer], nullptr));
    }
    unsigned char*& own = local.mailboxes[local.rank];
    if (alone && own != nullptr) memory_.release(local.ordinal, std::exchange(own, nullptr));
    Failure* record;
    {
      const std::lock_guard<std::mutex> lock(records_mutex_);
      record = std::exchange(local.failure, nullptr);
    }
    if (record != nullptr) memory_.release_on_host(local.ordinal, record);
  }
}

void Connection::free_all() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::closed) return;
  for (LocalRank& local : local_) {
    unsigned char*& own = local.mailboxes[local.rank];
    if (own != nullptr) memory_.release(local.ordinal, std::exchange(own, nullptr));
  }
}

}  // namespace jax_ring::gpu
