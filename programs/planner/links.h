// What connects the ranks of a mesh dimension. No torch here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace programs {

enum class Link { kWithinNode, kBetweenNodes };

// Of groups of `group` neighbours along dimension `dim` of a row-major mesh, or of all
// that the dimension has; its ranks fill nodes of `ranks_per_node` one after the other. A
// group that is partly on one node counts as between nodes, which is where it waits.
Link link_of(const std::vector<int64_t>& mesh_shape, size_t dim, int64_t group,
             int64_t ranks_per_node);

}  // namespace programs
