// A mesh of thread ranks whose collectives go through memory: shared_memory_backend.h for
// all of its groups.
//
//   const MeshInMemory memory({2, 3}, {"dp", "tp"});           // before the ranks start
//   run_ranks(memory.size(), [&](int64_t) {
//     const DeviceMesh mesh = memory.join();
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/support/shared_memory_backend.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {

class MeshInMemory {
 public:
  // With `side_groups`, named by their purposes, every dimension has these too; others
  // that are made later are Gloo's.
  explicit MeshInMemory(std::vector<int64_t> shape, std::vector<std::string> dim_names = {},
                        const std::vector<std::string>& side_groups = {});

  int64_t size() const;
  // The mesh of this thread, once per rank. Collective.
  DeviceMesh join() const;
  // The same mesh of ordinary groups, which are Gloo's and may share memory.
  DeviceMesh join_over_c10d() const;

 private:
  using Memory = std::shared_ptr<SharedMemory>;
  // Of one group of a dimension.
  struct Memories {
    Memory own;
    std::map<std::string, Memory> of_side_groups;
  };

  int64_t group_index(const DeviceMesh& mesh, int64_t dim) const;

  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<std::vector<Memories>> memories_;  // by dimension and group
};

}  // namespace fsdp::testing
