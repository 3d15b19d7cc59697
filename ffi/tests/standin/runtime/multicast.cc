// multicast.cc: cuMem* and cuMulticast* of the driver. In the host's build of the kernels the switch itself is a loop
// over the mailboxes. So the memory of GPUs is behind their own addresses, and nothing is behind the address that
// reaches all.
#include "tests/standin/runtime/multicast.h"

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/standin/runtime/machine.h"
#include "tests/standin/runtime/memory.h"

namespace jax_ring::standin {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGranularity = 2 << 20;

struct Part {
  int gpu;
  size_t bytes;
};

struct Team {
  CUmulticastObjectProp properties;
  std::vector<int> gpus;
  std::map<int, CUmemGenericAllocationHandle> bound;  // by GPU
  bool is_complete() const { return gpus.size() == properties.numDevices; }
};

struct Range {
  void* begin;
  size_t bytes;
  CUmemGenericAllocationHandle mapped = 0;
};

std::mutex mutex;
uint64_t next_handle = 0;
std::map<CUmemGenericAllocationHandle, Part> parts;
std::map<CUmemGenericAllocationHandle, Team> teams;
std::map<CUdeviceptr, Range> ranges;

// A call of the driver. Injected runtime errors have the driver's numbers.
template <class Body>
CUresult driver_call(const char* function, Body body) {
  Machine& machine = Machine::instance();
  if (stage_of_thread == Stage::execute) machine.violate(std::string(function) + " while a call is executed");
  const cudaError_t error = machine.enter(function);
  if (error != cudaSuccess) return static_cast<CUresult>(error);
  if (!machine.may_make_unsafe_call(function)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const DriverLock driver(function);
  const std::lock_guard<std::mutex> lock(mutex);
  return body();
}

// Bind and map would wait for the missing devices, forever in a process that adds them itself.
bool waits_for_devices(const Team& team, const char* function) {
  if (team.is_complete()) return false;
  Machine::instance().violate(std::string(function) + " before all GPUs have been added");
  return true;
}

CUresult get_device(CUdevice* device, int ordinal) {
  return driver_call("cuDeviceGet", [&] {
    if (ordinal < 0 || ordinal >= Machine::instance().hardware().num_gpus) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return driver_call("cuDeviceGetAttribute", [&] {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED && Machine::instance().hardware().has_multicast;
    return CUDA_SUCCESS;
  });
}

CUresult get_multicast_granularity(size_t* bytes, const CUmulticastObjectProp*, CUmulticastGranularity_flags) {
  return driver_call("cuMulticastGetGranularity", [&] {
    *bytes = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult get_memory_granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return driver_call("cuMemGetAllocationGranularity", [&] {
    *bytes = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult create_team(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties) {
  return driver_call("cuMulticastCreate", [&] {
    if (properties->numDevices == 0 || properties->size == 0 || properties->size % kGranularity != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *handle = ++next_handle;
    teams[*handle] = {*properties, {}, {}};
    return CUDA_SUCCESS;
  });
}

CUresult add_device(CUmemGenericAllocationHandle handle, CUdevice device) {
  return driver_call("cuMulticastAddDevice", [&] {
    const auto found = teams.find(handle);
    if (found == teams.end() || found->second.is_complete()) return CUDA_ERROR_INVALID_VALUE;
    found->second.gpus.push_back(device);
    return CUDA_SUCCESS;
  });
}

CUresult bind_memory(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                     size_t memory_offset, size_t bytes, unsigned long long) {
  return driver_call("cuMulticastBindMem", [&] {
    const auto team = teams.find(handle);
    const auto part = parts.find(memory);
    if (team == teams.end() || part == parts.end()) return CUDA_ERROR_INVALID_VALUE;
    if (waits_for_devices(team->second, "cuMulticastBindMem")) return CUDA_ERROR_NOT_PERMITTED;
    const std::vector<int>& gpus = team->second.gpus;
    if (offset != 0 || memory_offset != 0 || bytes != team->second.properties.size || bytes > part->second.bytes ||
        std::count(gpus.begin(), gpus.end(), part->second.gpu) != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return team->second.bound.emplace(part->second.gpu, memory).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult unbind_memory(CUmemGenericAllocationHandle handle, CUdevice device, size_t, size_t) {
  return driver_call("cuMulticastUnbind", [&] {
    const auto team = teams.find(handle);
    return team != teams.end() && team->second.bound.erase(device) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult create_memory(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long) {
  return driver_call("cuMemCreate", [&] {
    if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = ++next_handle;
    parts[*handle] = {properties->location.id, bytes};
    return CUDA_SUCCESS;
  });
}

CUresult release_handle(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", [&] {
    for (const auto& [address, range] : ranges) {
      if (range.mapped == handle) Machine::instance().violate("cuMemRelease of what is still mapped");
    }
    return parts.erase(handle) + teams.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult reserve_addresses(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
  return driver_call("cuMemAddressReserve", [&] {
    // A page before it describes the allocation; see memory.h.
    const size_t reserved = kPage + alignment + bytes;
    void* const begin = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (reinterpret_cast<uintptr_t>(begin) + kPage + alignment - 1) / alignment * alignment;
    ranges[*address] = {begin, reserved};
    return CUDA_SUCCESS;
  });
}

CUresult free_addresses(CUdeviceptr address, size_t) {
  return driver_call("cuMemAddressFree", [&] {
    const auto found = ranges.find(address);
    if (found == ranges.end() || found->second.mapped != 0) return CUDA_ERROR_INVALID_VALUE;
    munmap(found->second.begin, found->second.bytes);
    ranges.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult map_memory(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                    unsigned long long) {
  return driver_call("cuMemMap", [&] {
    const auto range = ranges.find(address);
    if (range == ranges.end() || range->second.mapped != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto part = parts.find(handle);
    const auto team = teams.find(handle);
    if (part == parts.end() && team == teams.end()) return CUDA_ERROR_INVALID_VALUE;
    if (team != teams.end() && waits_for_devices(team->second, "cuMemMap")) return CUDA_ERROR_NOT_PERMITTED;
    const auto kind = part != parts.end() ? Allocation::device : Allocation::multicast;
    const int gpu = part != parts.end() ? part->second.gpu : -1;
    auto* const at = reinterpret_cast<unsigned char*>(address);
    if (Memory::instance().allocate_at(kind, gpu, bytes, at) != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
    range->second.mapped = handle;
    return CUDA_SUCCESS;
  });
}

CUresult unmap_memory(CUdeviceptr address, size_t) {
  return driver_call("cuMemUnmap", [&] {
    const auto range = ranges.find(address);
    if (range == ranges.end() || range->second.mapped == 0) return CUDA_ERROR_INVALID_VALUE;
    const auto kind = parts.count(range->second.mapped) > 0 ? Allocation::device : Allocation::multicast;
    Memory::instance().release(kind, reinterpret_cast<void*>(address), "cuMemUnmap");
    range->second.mapped = 0;
    return CUDA_SUCCESS;
  });
}

CUresult set_access(CUdeviceptr address, size_t, const CUmemAccessDesc* access, size_t count) {
  return driver_call("cuMemSetAccess", [&] {
    for (size_t i = 0; i < count; ++i) {
      Memory::instance().give_access(reinterpret_cast<void*>(address), access[i].location.id);
    }
    return CUDA_SUCCESS;
  });
}

CUresult get_error_name(CUresult error, const char** name) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

void* multicast_function(const char* name) {
  static const std::map<std::string, void*> functions = {
      {"cuDeviceGet", reinterpret_cast<void*>(&get_device)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&get_attribute)},
      {"cuMulticastGetGranularity", reinterpret_cast<void*>(&get_multicast_granularity)},
      {"cuMulticastCreate", reinterpret_cast<void*>(&create_team)},
      {"cuMulticastAddDevice", reinterpret_cast<void*>(&add_device)},
      {"cuMulticastBindMem", reinterpret_cast<void*>(&bind_memory)},
      {"cuMulticastUnbind", reinterpret_cast<void*>(&unbind_memory)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&get_memory_granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(&create_memory)},
      {"cuMemRelease", reinterpret_cast<void*>(&release_handle)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve_addresses)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&free_addresses)},
      {"cuMemMap", reinterpret_cast<void*>(&map_memory)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap_memory)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuGetErrorName", reinterpret_cast<void*>(&get_error_name)},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

size_t num_driver_objects() {
  const std::lock_guard<std::mutex> lock(mutex);
  return parts.size() + teams.size() + ranges.size();
}

}  // namespace jax_ring::standin
