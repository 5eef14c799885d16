#include "dtensor/tensor/dtensor_spec.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fsdp::internal {
namespace {

TensorLayout layout_on(const DeviceMesh& mesh, std::vector<Placement> placements,
                       std::vector<int64_t> shape, std::vector<int64_t> stride) {
  try {
    return TensorLayout({.mesh_shape = mesh.shape(),
                         .placements = std::move(placements),
                         .shape = std::move(shape),
                         .stride = std::move(stride)});
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what(), " (on ", mesh, ", rank ", mesh.rank(), ")");
  }
}

}  // namespace

DTensorSpec::DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements,
                         std::vector<int64_t> shape, std::vector<int64_t> stride)
    : mesh_(std::move(mesh)),
      layout_(layout_on(mesh_, std::move(placements), std::move(shape), std::move(stride))) {}

DTensorSpec::DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements,
                         const std::vector<int64_t>& shape)
    : DTensorSpec(std::move(mesh), std::move(placements), shape, contiguous_strides(shape)) {}

DTensorSpec DTensorSpec::with_placements(std::vector<Placement> placements) const {
  return {mesh_, std::move(placements), shape(), stride()};
}

DTensorSpec DTensorSpec::with_geometry(std::vector<int64_t> shape,
                                       std::vector<int64_t> stride) const {
  return {mesh_, placements(), std::move(shape), std::move(stride)};
}

DTensorSpec DTensorSpec::with_shape(std::vector<int64_t> shape) const {
  auto stride = contiguous_strides(shape);
  return with_geometry(std::move(shape), std::move(stride));
}

DTensorSpec DTensorSpec::without_partials() const {
  return with_placements(internal::without_partials(placements()));
}

DTensorSpec DTensorSpec::replicated() const {
  return with_placements(std::vector<Placement>(placements().size(), Replicate{}));
}

DTensorSpec DTensorSpec::simplified() const {
  auto simple = placements();
  for (size_t m = 0; m < simple.size(); ++m) {
    if (!simple[m].is_interleaved()) continue;
    const Shard& cut = simple[m].shard();
    simple[m] = simplest(cut, shape()[static_cast<size_t>(cut.dim)], mesh_.shape()[m]);
  }
  return with_placements(std::move(simple));
}

std::vector<Placement> without_partials(std::vector<Placement> placements) {
  for (auto& placement : placements) {
    if (placement.is_partial()) placement = Replicate{};
  }
  return placements;
}

std::string to_string(const DTensorSpec& spec) {
  std::ostringstream out;
  out << to_string(spec.layout()) << " on " << spec.mesh();
  return out.str();
}

}  // namespace fsdp::internal
