// multicast_memory.cc: creates a multicast object, binds memory of each GPU to it, and maps both.
//
// It calls, of the driver: cuDeviceGet, cuDeviceGetAttribute, cuMulticastGetGranularity, cuMulticastCreate,
// cuMulticastAddDevice, cuMulticastBindMem, cuMulticastUnbind, cuMemGetAllocationGranularity, cuMemCreate,
// cuMemRelease, cuMemAddressReserve, cuMemAddressFree, cuMemMap, cuMemUnmap, cuMemSetAccess, cuGetErrorName. None of
// them waits for the work of a GPU, as far as CUDA documents.
#include "cuda/runtime/multicast_memory.h"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "cuda/runtime/driver.h"

namespace jax_ring::gpu {
namespace {

// Multicast came with CUDA 12.1.
constexpr unsigned kCudaVersion = 12010;

struct Driver {
#define JAX_RING_FOR_EACH_FUNCTION(X) \
  X(cuDeviceGet)                      \
  X(cuDeviceGetAttribute)             \
  X(cuMulticastGetGranularity)        \
  X(cuMulticastCreate)                \
  X(cuMulticastAddDevice)             \
  X(cuMulticastBindMem)               \
  X(cuMulticastUnbind)                \
  X(cuMemGetAllocationGranularity)    \
  X(cuMemCreate)                      \
  X(cuMemRelease)                     \
  X(cuMemAddressReserve)              \
  X(cuMemAddressFree)                 \
  X(cuMemMap)                         \
  X(cuMemUnmap)                       \
  X(cuMemSetAccess)                   \
  X(cuGetErrorName)
#define JAX_RING_MEMBER(name) decltype(&::name) name = nullptr;
  JAX_RING_FOR_EACH_FUNCTION(JAX_RING_MEMBER)
#undef JAX_RING_MEMBER

  Driver() {
#define JAX_RING_FIND(name) find_driver_function(#name, kCudaVersion, &name);
    JAX_RING_FOR_EACH_FUNCTION(JAX_RING_FIND)
#undef JAX_RING_FIND
#undef JAX_RING_FOR_EACH_FUNCTION
  }

  static const Driver& functions() {
    static const Driver all;
    return all;
  }
};

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  Driver::functions().cuGetErrorName(result, &name);
  throw std::runtime_error(std::string(what) + ": " +
                           (name != nullptr ? name : "error " + std::to_string(static_cast<int>(result))));
}

CUmemAllocationProp properties_on(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  return properties;
}

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// An address range with memory behind it, which the devices can access.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping() { release(); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void map(CUmemGenericAllocationHandle memory, size_t bytes, size_t alignment, const std::vector<int>& devices) {
    const Driver& driver = Driver::functions();
    bytes_ = bytes;
    check(driver.cuMemAddressReserve(&address_, bytes, alignment, 0, 0), "cuMemAddressReserve");
    check(driver.cuMemMap(address_, bytes, 0, memory, 0), "cuMemMap");
    is_mapped_ = true;
    std::vector<CUmemAccessDesc> access;
    for (int device : devices) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    check(driver.cuMemSetAccess(address_, bytes, access.data(), access.size()), "cuMemSetAccess");
  }

  void release() noexcept {
    const Driver& driver = Driver::functions();
    if (std::exchange(is_mapped_, false)) driver.cuMemUnmap(address_, bytes_);
    if (address_ != 0) driver.cuMemAddressFree(std::exchange(address_, 0), bytes_);
  }

  void* address() const { return reinterpret_cast<void*>(address_); }

 private:
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
};

}  // namespace

// The memory of each device, and the object that joins the parts.
class MulticastAllocations::Allocation {
 public:
  Allocation(const std::vector<int>& devices, size_t bytes) : parts_(devices.size()) {
    const Driver& driver = Driver::functions();
    for (size_t i = 0; i < devices.size(); ++i) check(driver.cuDeviceGet(&parts_[i].device, devices[i]), "cuDeviceGet");
    CUmulticastObjectProp properties{};
    properties.numDevices = static_cast<unsigned>(devices.size());
    properties.size = bytes;
    size_t unit = 0;
    check(driver.cuMulticastGetGranularity(&unit, &properties, CU_MULTICAST_GRANULARITY_RECOMMENDED),
          "cuMulticastGetGranularity");
    for (int device : devices) {
      const CUmemAllocationProp memory = properties_on(device);
      size_t each = 0;
      check(driver.cuMemGetAllocationGranularity(&each, &memory, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            "cuMemGetAllocationGranularity");
      unit = std::max(unit, each);  // both are powers of two
    }
    bytes_ = properties.size = rounded_up(bytes, unit);
    try {
      check(driver.cuMulticastCreate(&all_, &properties), "cuMulticastCreate");
      has_all_ = true;
      // Add all devices before any memory: binding waits for them.
      for (const Part& part : parts_) check(driver.cuMulticastAddDevice(all_, part.device), "cuMulticastAddDevice");
      for (size_t i = 0; i < parts_.size(); ++i) {
        Part& part = parts_[i];
        const CUmemAllocationProp memory = properties_on(devices[i]);
        check(driver.cuMemCreate(&part.memory, bytes_, &memory, 0), "cuMemCreate");
        part.has_memory = true;
        check(driver.cuMulticastBindMem(all_, 0, part.memory, 0, bytes_, 0), "cuMulticastBindMem");
        part.is_bound = true;
        part.mapping.map(part.memory, bytes_, unit, devices);
      }
      mapping_.map(all_, bytes_, unit, devices);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Allocation() { release(); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  MulticastMemory addresses() const {
    MulticastMemory memory;
    for (const Part& part : parts_) memory.parts.push_back(part.mapping.address());
    memory.all = mapping_.address();
    return memory;
  }

 private:
  struct Part {
    CUdevice device = 0;
    CUmemGenericAllocationHandle memory = 0;
    bool has_memory = false, is_bound = false;
    Mapping mapping;
  };

  // Ignore errors: at the end of a program the driver may be gone, with all memory.
  void release() noexcept {
    const Driver& driver = Driver::functions();
    mapping_.release();
    for (Part& part : parts_) {
      if (std::exchange(part.is_bound, false)) driver.cuMulticastUnbind(all_, part.device, 0, bytes_);
      part.mapping.release();
      if (std::exchange(part.has_memory, false)) driver.cuMemRelease(part.memory);
    }
    if (std::exchange(has_all_, false)) driver.cuMemRelease(all_);
  }

  std::vector<Part> parts_;
  size_t bytes_ = 0;
  CUmemGenericAllocationHandle all_ = 0;
  bool has_all_ = false;
  Mapping mapping_;
};

MulticastAllocations::MulticastAllocations() = default;
MulticastAllocations::~MulticastAllocations() = default;

std::string MulticastAllocations::why_no_multicast(const std::vector<int>& devices) {
  try {
    const Driver& driver = Driver::functions();
    for (int device : devices) {
      CUdevice handle;
      check(driver.cuDeviceGet(&handle, device), "cuDeviceGet");
      int is_supported = 0;
      check(driver.cuDeviceGetAttribute(&is_supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, handle),
            "cuDeviceGetAttribute");
      if (is_supported == 0) return "the GPU with CUDA ordinal " + std::to_string(device) + " has none";
    }
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

MulticastMemory MulticastAllocations::allocate(const std::vector<int>& devices, size_t bytes) {
  auto allocation = std::make_unique<Allocation>(devices, bytes);
  const MulticastMemory memory = allocation->addresses();
  const std::lock_guard<std::mutex> lock(mutex_);
  by_address_[memory.all] = std::move(allocation);
  return memory;
}

void MulticastAllocations::release(const MulticastMemory& memory) noexcept {
  std::unique_ptr<Allocation> released;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_address_.find(memory.all);
  if (found == by_address_.end()) return;
  released = std::move(found->second);
  by_address_.erase(found);
}

}  // namespace jax_ring::gpu
