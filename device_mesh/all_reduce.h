// What a training loop itself needs of the other ranks: a number that combines theirs,
// and a barrier.
//
//   const double loss_of_all = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
//   const bool stop = fsdp::all_reduce(interrupted ? 1 : 0, mesh, fsdp::Reduce::kMax) != 0;
//   if (fsdp::is_rank_zero()) std::printf("loss %g\n", loss_of_all);
//   fsdp::barrier(mesh);
//
// Functions that take a mesh are collective over all its ranks, which must call them in
// the same order. Ranks that call different ones, or another collective meanwhile, get an
// error that names both.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <type_traits>

namespace fsdp {

enum class Reduce { kSum, kMean, kMax, kMin };

// Local. Whether this is rank 0 of the default group or, before there is one, of what the
// launcher says: the rank that prints and makes folders.
[[nodiscard]] FSDP_API bool is_rank_zero();

// Returns when all ranks of the mesh have called it.
FSDP_API void barrier(const DeviceMesh& mesh);

// The sum, mean, maximum or minimum of all ranks' values: a new plain tensor of the same
// shape, dtype and device, without a graph; bit-equal on all ranks, and NaN where one has
// NaN. `value`: a plain tensor of the same shape and dtype on every rank, on the mesh's
// device. Each rank holds the values of all meanwhile, so for small ones: counts, losses,
// histograms. Waits for the device. Throws ValueError for a DTensor, for the mean of
// integers, and, on all ranks alike, where they ask for different reductions or have
// different dtypes.
[[nodiscard]] FSDP_API at::Tensor all_reduce(const at::Tensor& value, const DeviceMesh& mesh,
                                             Reduce op = Reduce::kSum);

namespace internal {
FSDP_API double all_reduce_value(double value, const DeviceMesh& mesh, Reduce op);
FSDP_API int64_t all_reduce_value(int64_t value, const DeviceMesh& mesh, Reduce op);
}  // namespace internal

// The same of one number: a double of floating ones, an int64_t of integers and bools.
template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
[[nodiscard]] auto all_reduce(Number value, const DeviceMesh& mesh, Reduce op = Reduce::kSum) {
  using Wide = std::conditional_t<std::is_floating_point_v<Number>, double, int64_t>;
  return internal::all_reduce_value(static_cast<Wide>(value), mesh, op);
}

}  // namespace fsdp
