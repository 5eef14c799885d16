// Runs the same function on DTensors in every placement and on the plain tensor, and
// compares.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

at::Tensor whole(const at::Tensor& tensor);  // full_tensor() of a DTensor, else the tensor

// On every rank of worlds of 1, 2 and 3, with a 1-D mesh; ranks of a world of 3 hold
// empty shards of two rows.
void on_worlds(const std::function<void(const DeviceMesh&)>& body);
// The same, and of a world of 4 with a 2x2 mesh.
void on_meshes(const std::function<void(const DeviceMesh&)>& body);

// A tensor of {2, 4} and one of {5, 4} in every placement, beside its plain value.
void on_placements(const DeviceMesh& mesh,
                   const std::function<void(const at::Tensor&, const at::Tensor&)>& body);

struct Case {
  std::string name;
  std::function<std::vector<at::Tensor>(const at::Tensor&)> function;
};
// Every case gives DTensors with the plain results' shapes, dtypes and values.
void expect_same(const std::vector<Case>& cases, double tolerance = 1e-6);
// The text of the c10::Error that `body` throws, or "no error".
std::string error_of(const std::function<void()>& body);

}  // namespace fsdp::testing
