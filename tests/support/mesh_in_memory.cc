#include "tests/support/mesh_in_memory.h"

#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::testing {

MeshInMemory::MeshInMemory(std::vector<int64_t> shape, std::vector<std::string> dim_names,
                           const std::vector<std::string>& side_groups)
    : shape_(std::move(shape)), dim_names_(std::move(dim_names)) {
  for (const int64_t ranks : shape_) {
    auto& groups = memories_.emplace_back(static_cast<size_t>(size() / ranks));
    for (Memories& group : groups) {
      group.own = make_shared_memory(ranks);
      for (const auto& purpose : side_groups)
        group.of_side_groups[purpose] = make_shared_memory(ranks);
    }
  }
}

int64_t MeshInMemory::size() const { return c10::multiply_integers(shape_); }

DeviceMesh MeshInMemory::join() const {
  auto mesh = join_over_c10d();
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const auto group = static_cast<size_t>(group_index(mesh, dim));
    const Memories& memories = memories_[static_cast<size_t>(dim)][group];
    use_shared_memory(mesh.group(dim), memories.own);
    for (const auto& [purpose, memory] : memories.of_side_groups)
      use_shared_memory(mesh.side_group(dim, purpose), memory);
  }
  return mesh;
}

DeviceMesh MeshInMemory::join_over_c10d() const {
  return init_device_mesh(c10::kCPU, shape_, dim_names_);
}

// The coordinate without that of `dim`, row-major.
int64_t MeshInMemory::group_index(const DeviceMesh& mesh, int64_t dim) const {
  int64_t index = 0;
  for (int64_t other = 0; other < mesh.ndim(); ++other) {
    if (other != dim) index = index * mesh.size(other) + mesh.local_rank(other);
  }
  return index;
}

}  // namespace fsdp::testing
