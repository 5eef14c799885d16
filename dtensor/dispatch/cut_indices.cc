#include "dtensor/dispatch/cut_indices.h"

#include "dtensor/redistribute/redistribute.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <vector>

namespace fsdp::internal {

namespace {

// The atom of an element, and where in it that lies, by block.
struct Place {
  at::Tensor block, atom, element;
};

Place place_of(const at::Tensor& indices, int64_t unit, int64_t atoms) {
  const at::Tensor atom = indices.floor_divide(unit);
  return {.block = atom.floor_divide(atoms),
          .atom = atom.remainder(atoms),
          .element = indices.remainder(unit)};
}

// What the cut of one mesh dimension makes of `indices` into `size` elements.
CutIndices cut_once(const at::Tensor& indices, const Shard& cut, int64_t size, const Chunk& own) {
  const int64_t unit = atom_size(cut, size);
  const Place place = place_of(indices, unit, atoms_of(cut, size));
  const at::Tensor atom = place.atom.sub(own.offset);
  const at::Tensor is_elsewhere = atom.lt(0).logical_or_(atom.ge(own.length));
  const at::Tensor in_part = place.block.mul(own.length).add_(atom).mul_(unit).add_(place.element);
  return {.in_part = in_part.masked_fill(is_elsewhere, 0), .is_elsewhere = is_elsewhere};
}

}  // namespace

CutIndices cut_indices(const at::Tensor& indices, const DTensorSpec& spec, int64_t dim) {
  CutIndices cut{.in_part = indices, .is_elsewhere = at::zeros_like(indices, at::kBool)};
  int64_t size = spec.shape()[static_cast<size_t>(dim)];
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!spec.placements()[m].is_shard(dim) || size == 0) continue;
    const Shard& shard = spec.placements()[m].shard();
    const auto mesh_dim = static_cast<int64_t>(m);
    const Chunk own =
        own_atoms(shard, size, spec.mesh().size(mesh_dim), spec.mesh().local_rank(mesh_dim));
    const auto inner = cut_once(cut.in_part, shard, size, own);
    cut = {.in_part = inner.in_part,
           .is_elsewhere = cut.is_elsewhere.logical_or(inner.is_elsewhere)};
    size = shard.outer * own.length * atom_size(shard, size);
  }
  return cut;
}

at::Tensor elements_of_part(const DTensorSpec& spec, int64_t dim) {
  const int64_t size = spec.shape()[static_cast<size_t>(dim)];
  std::vector<Placement> cuts;
  for (const Placement& placement : spec.placements())
    cuts.push_back(placement.is_shard(dim) ? placement.along(0) : Placement(Replicate{}));
  const auto on_device = at::TensorOptions(at::kLong).device(local_device(spec.mesh()));
  return local_part(at::arange(size, on_device), DTensorSpec(spec.mesh(), cuts, {size}));
}

void check_indices(const at::Tensor& indices, int64_t size, const char* what) {
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto least = indices.min().item<int64_t>(), most = indices.max().item<int64_t>();
  TORCH_CHECK_INDEX(least >= 0 && most < size, what, " ", least < 0 ? least : most,
                    " is out of range: allowed are 0 to ", size - 1);
}

}  // namespace fsdp::internal
