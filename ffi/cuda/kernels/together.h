// together.h: launches several ranks that share a GPU as one kernel. For checks; programs launch one rank at a time.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/kernel_table.h"

namespace jax_ring::gpu {

using TogetherKernel = void (*)(const Call* calls, int num_ctas);
using TogetherTable = TableOf<TogetherKernel>;

// Runs the ranks' calls, an array in device memory, each with `num_ctas` teams. Ranks that wait for each other must run
// at the same time: if the GPU lacks room for all teams, this returns cudaErrorCooperativeLaunchTooLarge and launches
// nothing.
cudaError_t launch_together(const KernelKey& key, const Call* calls, int num_ranks, int num_ctas, cudaStream_t stream);

// How many teams of the kernel a GPU can run at the same time, for all its ranks together.
int most_teams_at_once(const KernelKey& key, int device);

}  // namespace jax_ring::gpu
