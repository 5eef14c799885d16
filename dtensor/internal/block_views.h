// Parts of a dimension that is cut in blocks: whole blocks of it are cut as before, so
// that query, key and value come out of one cut matrix without being gathered.
#pragma once

#include "dtensor/internal/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Elements [start, start + length) of dimension `dim`.
struct DimRange {
  int64_t dim, start, length;
};

// The placements of those elements of a tensor that lies as `spec`, each rank having what
// it has of them. Nothing where several mesh dimensions cut the dimension, or the range
// is not one of whole blocks.
std::optional<std::vector<Placement>> placements_of_range(const DTensorSpec& spec,
                                                          const DimRange& range);

// Where this rank's part of the range lies in its part of the dimension. REQUIRES:
// placements_of_range gave placements.
DimRange local_range(const DTensorSpec& spec, const DimRange& range);

// The inverse: the placements of a tensor whose dimension is `size` long, of which the
// range lies as `part` says.
std::optional<std::vector<Placement>> placements_around(const DTensorSpec& part, int64_t size,
                                                        const DimRange& range);

}  // namespace fsdp::internal
