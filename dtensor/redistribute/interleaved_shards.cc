#include "dtensor/redistribute/interleaved_shards.h"

#include "dtensor/layout/shard_layout.h"

namespace fsdp::internal {

std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut) {
  const auto dim = shape.begin() + cut.dim;
  const int64_t atoms = atoms_of(cut, *dim);
  *dim = cut.outer;
  shape.insert(dim + 1, {atoms, cut.unit});
  return shape;
}

}  // namespace fsdp::internal
