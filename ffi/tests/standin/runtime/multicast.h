// multicast.h: the driver's functions for memory behind an NVSwitch, for absent GPUs.
#pragma once

#include <cstddef>

namespace jax_ring::standin {

// A function of the driver by its name; null if it is not one of these.
void* multicast_function(const char* name);

// Objects of the driver that have not been released: memory, multicast objects and address ranges.
size_t num_driver_objects();

}  // namespace jax_ring::standin
