// Functions of several tensors on DTensors in random placements, against plain tensors.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace fsdp::testing {

// Every list of Replicate, Partial(sum) and Shards for a tensor of `ndim` dimensions.
std::vector<std::vector<Placement>> lists_for(const DeviceMesh& mesh, int64_t ndim);

// `plain` placed so; terms of a Partial differ from rank to rank. Local.
at::Tensor placed(const at::Tensor& plain, const DeviceMesh& mesh,
                  const std::vector<Placement>& placements);

// Doubles that differ, the same on all ranks.
at::Tensor waves(const std::vector<int64_t>& shape, double step = 0.7);

struct Problem {
  std::vector<at::Tensor> inputs;  // plain
  std::function<at::Tensor(const std::vector<at::Tensor>&)> function;
};
// On every mesh of on_meshes, for `count` random choices of placements of the inputs,
// some of which stay plain: value and gradients are those of plain inputs.
void expect_as_plain(const std::function<Problem()>& problem, int count = 25);

}  // namespace fsdp::testing
