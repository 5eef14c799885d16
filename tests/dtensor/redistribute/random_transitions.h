// Random pairs of placements of a random shape, for tests of what moves a tensor from one
// to the other.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

// Linear terms (sums and averages, or none at all), which autograd sees through.
bool is_linear(const Placement& placement);
// The Partials of one list may stand together: all linear, or all of one kind.
bool commute(const std::vector<Placement>& placements);

struct Transition {
  std::vector<Placement> from, to;
  std::vector<int64_t> shape;
  uint64_t value_seed;
};
std::string to_string(const Transition& transition, const DeviceMesh& mesh);

// `count` transitions of tensors of one to three dimensions of up to nine elements, the
// same on every thread rank and in every run.
void on_random_transitions(const std::vector<int64_t>& mesh_shape, int count, unsigned seed,
                           const std::function<void(const DeviceMesh&, const Transition&)>& body);

}  // namespace fsdp::testing
