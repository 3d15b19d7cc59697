// machine.cc: the state of the absent GPUs: contexts, access, captures, injected errors and violations.
#include "tests/standin/runtime/machine.h"

#include <chrono>
#include <random>
#include <thread>

namespace jax_ring::standin {
namespace {

thread_local int current = -1;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local int strict_captures = 0;  // captures in a mode that is not relaxed, begun by this thread
std::atomic<unsigned> threads_seen{0};

// Longer than any kernel of a test.
constexpr std::chrono::seconds kPatience{60};

}  // namespace

thread_local Stage stage_of_thread = Stage::none;

void jitter() {
  const unsigned seed = Machine::instance().hardware().seed;
  if (seed == 0) return;
  thread_local unsigned seeded_with = 0;
  thread_local std::minstd_rand random;
  if (seeded_with != seed) {
    seeded_with = seed;
    random.seed(seed * 7919 + threads_seen.fetch_add(1) * 104729 + 1);
  }
  const unsigned dice = random() % 16;
  if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  if (dice < 6) std::this_thread::yield();
}

int current_gpu() { return current; }
void set_current_gpu(int gpu) { current = gpu; }

int required_gpu(const char* function) {
  if (current < 0) {
    Machine::instance().create_context(0, function);
    current = 0;
  }
  return current;
}

Machine& Machine::instance() {
  static auto* const machine = new Machine;  // never destroyed: threads of streams may outlive static objects
  return *machine;
}

void Machine::reset(const Hardware& hardware) {
  const std::lock_guard<std::mutex> lock(mutex_);
  hardware_ = hardware;
  allowed_contexts_.clear();
  contexts_.clear();
  all_contexts_allowed_ = true;
  loaded_together_.clear();
  severed_.clear();
  access_.clear();
  loaded_.clear();
  injected_.clear();
  calls_.clear();
  violations_.clear();
  last_error = cudaSuccess;
}

void Machine::allow_contexts(std::set<int> gpus) {
  const std::lock_guard<std::mutex> lock(mutex_);
  allowed_contexts_ = std::move(gpus);
  all_contexts_allowed_ = false;
}

void Machine::expect_loaded_together(std::vector<int> gpus) {
  const std::lock_guard<std::mutex> lock(mutex_);
  loaded_together_ = std::move(gpus);
}

void Machine::sever(int gpu, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  severed_.insert({gpu, peer});
}

void Machine::fail(const std::string& function, cudaError_t error, int times, int after) {
  const std::lock_guard<std::mutex> lock(mutex_);
  injected_[function].push_back({error, times, after});
}

std::vector<std::string> Machine::violations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return violations_;
}

std::set<int> Machine::contexts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return contexts_;
}

uint64_t Machine::num_calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [function, calls] : calls_) sum += calls;
  return sum;
}

uint64_t Machine::num_calls(const std::string& function) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

cudaError_t Machine::enter(const char* function) {
  jitter();
  if (stage_of_thread == Stage::instantiate) {
    violate(std::string(function) + " while a program is compiled, which may happen where no GPU is");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[function];
  const auto found = injected_.find(function);
  if (found == injected_.end() || found->second.empty()) return cudaSuccess;
  Injected& next = found->second.front();
  if (next.after-- > 0) return cudaSuccess;
  const cudaError_t error = next.error;
  if (--next.times == 0) found->second.pop_front();
  return error;
}

cudaError_t Machine::leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void Machine::violate(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  violations_.push_back(what);
}

bool Machine::is_severed(int gpu, int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return severed_.count({gpu, peer}) > 0;
}

bool Machine::has_access(int gpu, int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return gpu == peer || access_.count({gpu, peer}) > 0;
}

cudaError_t Machine::enable_access(int gpu, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (severed_.count({gpu, peer}) > 0) return cudaErrorPeerAccessUnsupported;
  return access_.insert({gpu, peer}).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}

void Machine::create_context(int gpu, const char* function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!contexts_.insert(gpu).second) return;
  if (all_contexts_allowed_ || allowed_contexts_.count(gpu) > 0) return;
  violations_.push_back(std::string(function) + " created a context on GPU " + std::to_string(gpu) +
                        ", which is not this process's");
}

void Machine::mark_loaded(const void* kernel, int gpu) {
  const std::lock_guard<std::mutex> lock(mutex_);
  loaded_.insert({kernel, gpu});
}

bool Machine::is_loaded(const void* kernel, int gpu) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return loaded_.count({kernel, gpu}) > 0;
}

void Machine::check_loaded_together(const void* kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int gpu : loaded_together_) {
    if (loaded_.count({kernel, gpu}) > 0) continue;
    violations_.push_back("a kernel was launched before GPU " + std::to_string(gpu) + " had loaded it");
  }
}

void Machine::kernel_started() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++running_kernels_;
}

void Machine::kernel_ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_kernels_;
  changed_.notify_all();
}

bool Machine::kernels_run() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return running_kernels_ > 0;
}

void Machine::capture_began(cudaStreamCaptureMode mode) {
  if (mode != cudaStreamCaptureModeRelaxed) ++strict_captures;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mode == cudaStreamCaptureModeGlobal) ++global_captures_;
}

void Machine::capture_ended(cudaStreamCaptureMode mode) {
  if (mode != cudaStreamCaptureModeRelaxed) --strict_captures;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mode == cudaStreamCaptureModeGlobal) --global_captures_;
}

// By the documentation of cudaThreadExchangeStreamCaptureMode.
bool Machine::may_make_unsafe_call(const char* function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool prohibited = (capture_mode != cudaStreamCaptureModeRelaxed && strict_captures > 0) ||
                          (capture_mode == cudaStreamCaptureModeGlobal && global_captures_ > 0);
  if (!prohibited) return true;
  invalidations_.fetch_add(1);
  violations_.push_back(std::string(function) + " invalidated a capture");
  return false;
}

DriverLock::DriverLock(const char* function) {
  Machine& machine = Machine::instance();
  std::unique_lock<std::mutex> lock(machine.mutex_);
  const bool free = machine.changed_.wait_until(lock, std::chrono::steady_clock::now() + kPatience, [&] {
    return !machine.driver_taken_ && (machine.running_kernels_ == 0 || !machine.hardware_.driver_waits_for_kernels);
  });
  if (!free) machine.violations_.push_back(std::string(function) + " waited for a kernel that does not end");
  machine.driver_taken_ = true;
}

DriverLock::~DriverLock() {
  Machine& machine = Machine::instance();
  const std::lock_guard<std::mutex> lock(machine.mutex_);
  machine.driver_taken_ = false;
  machine.changed_.notify_all();
}

}  // namespace jax_ring::standin

using jax_ring::standin::Machine;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = jax_ring::standin::last_error;
  jax_ring::standin::last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return jax_ring::standin::last_error; }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const cudaError_t error = Machine::instance().enter("cudaThreadExchangeStreamCaptureMode");
  if (error == cudaSuccess) std::swap(jax_ring::standin::capture_mode, *mode);
  return Machine::leave(error);
}

}  // extern "C"
