// Functions for FSDPModule::set_custom_all_gather and set_custom_reduce_scatter, ready
// made or to be called by your own.
//
//   const auto narrow = fsdp::compressed_reduce_scatter(mesh, at::kBFloat16);
//   for (auto& unit : fsdp::fsdp_modules(*model)) unit.set_custom_reduce_scatter(narrow);
//
// Each sends over a process group of its own, of the ranks of `mesh` that shard. Making
// one is collective over them, calling it too. On devices it is ordered after the current
// stream, and the work's wait() orders that stream after it.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/communicate.h"

#include <c10/core/ScalarType.h>

namespace fsdp {

[[nodiscard]] FSDP_API Communicate all_gather_over(const DeviceMesh& mesh);
[[nodiscard]] FSDP_API Communicate reduce_scatter_over(const DeviceMesh& mesh);
// Sends floating rows as `dtype`, adds them up in the backend's way for that, and casts
// the sums back: PyTorch's fp16 and bf16 compression hooks. Rows that have `dtype`
// already (MixedPrecisionPolicy::reduce_dtype) are not cast. Through Gloo half the bytes
// of float travel. Throws ValueError for a `dtype` other than Half and BFloat16.
[[nodiscard]] FSDP_API Communicate compressed_reduce_scatter(const DeviceMesh& mesh,
                                                             at::ScalarType dtype);

}  // namespace fsdp
