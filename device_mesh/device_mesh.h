// A DeviceMesh arranges the ranks of a job in an n-dimensional grid and owns one process
// group per dimension.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 4}, {"dp", "tp"});
//   mesh["tp"].size();        // 4
//   mesh.coordinate();        // this rank's {dp, tp}
//   mesh.group(1);            // the c10d group of this rank's row
//
// A mesh is an immutable value: copying shares it. Equality compares device type, ranks,
// shape and names, never groups. Slices share the groups of the mesh they come from; a
// group is created once.
#pragma once

#include "device_mesh/api.h"

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace fsdp {

class FSDP_API DeviceMesh {
 public:
  // A 1-D mesh over an existing group; creates nothing. Local.
  [[nodiscard]] static DeviceMesh from_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                             c10::DeviceType device_type,
                                             std::vector<int64_t> ranks = {},
                                             std::string dim_name = {});

  // An n-D mesh of `shape` over `ranks` (global, row-major) with one existing group per
  // dimension. Local. Throws ValueError unless there is one group per dimension and each
  // group's size matches the dimension's.
  [[nodiscard]] static DeviceMesh from_groups(
      std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, c10::DeviceType device_type,
      std::vector<int64_t> ranks, std::vector<int64_t> shape, std::vector<std::string> dim_names);

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  int64_t size() const;  // number of ranks
  int64_t size(
      int64_t dim) const;  // negative dims count from the end; throws IndexError out of range
  const std::vector<int64_t>& shape() const;
  const std::vector<std::string>& dim_names() const;  // empty when unnamed
  const std::vector<int64_t>& ranks() const;          // global ranks, row-major

  int64_t rank() const;                            // this process's (or thread's) global rank
  int64_t local_rank(int64_t dim = 0) const;       // this rank's index along `dim`
  const std::vector<int64_t>& coordinate() const;  // this rank's index along every dimension
  const c10::intrusive_ptr<c10d::ProcessGroup>& group(int64_t dim = 0) const;
  // Which slice of the mesh that it was cut from this one is, of those along the same
  // dimensions: 0, 1, ... in the order of their first ranks; the same on all its ranks.
  // 0 for a mesh that was not cut.
  int64_t slice_index() const;

  // A group over the same ranks as group(dim) for traffic that must not queue behind it,
  // for example "reduce". Created at the first call with this purpose and shared by every
  // slice. The first call is collective over the ranks of group(dim); later calls are
  // local.
  c10::intrusive_ptr<c10d::ProcessGroup> side_group(int64_t dim, const std::string& purpose) const;

  // The sub-mesh along the named dimensions. Local. Throws ValueError that lists the
  // names for an unknown one.
  [[nodiscard]] DeviceMesh operator[](const std::string& dim_name) const;
  [[nodiscard]] DeviceMesh operator[](const std::vector<std::string>& dim_names) const;
  // mesh[{"dp", "tp"}], which could also mean one string by its begin and end.
  [[nodiscard]] DeviceMesh operator[](std::initializer_list<const char*> dim_names) const {
    return (*this)[std::vector<std::string>(dim_names.begin(), dim_names.end())];
  }

  // The same ranks with the dimensions in another order: dimension d of the result is
  // dims[d] of this mesh (at::permute). Local. Throws ValueError unless `dims` has each
  // dimension once.
  [[nodiscard]] DeviceMesh permute(const std::vector<int64_t>& dims) const;

  // The mesh of this one's dimensions, then those of `inner`, through this rank: the
  // slice that mesh[{"tp", "dp"}] is of mesh["tp"] and mesh["dp"]. Local. Throws
  // ValueError unless both were cut from one mesh, along different dimensions.
  [[nodiscard]] DeviceMesh beside(const DeviceMesh& inner) const;

  // This mesh with the named dimensions merged into one called `name` (default: the names
  // joined by "_"), whose index is row-major over them in the given order. It stands
  // where the first of them stood; the other dimensions stay. Slice the result by `name`
  // for the 1-D mesh. Collective over the ranks of those dimensions the first time, local
  // afterwards. Throws ValueError for an unknown name, or where no default group contains
  // the mesh's ranks.
  [[nodiscard]] DeviceMesh flatten(const std::vector<std::string>& dim_names,
                                   std::string name = {}) const;

  // The 1-D mesh of the `n` neighbours along dimension `dim` that this rank is one of:
  // those with indices [k n, (k + 1) n). Unnamed. Collective over the ranks of group(dim)
  // the first time, local afterwards. Throws ValueError unless n divides the dimension
  // (of a flattened one, the dimensions that it was made of in turn), or where no default
  // group contains the mesh's ranks.
  [[nodiscard]] DeviceMesh neighbours(int64_t dim, int64_t n) const;

  friend bool operator==(const DeviceMesh&, const DeviceMesh&);
  friend bool operator!=(const DeviceMesh& a, const DeviceMesh& b) { return !(a == b); }
  size_t hash() const;

 private:
  struct State;
  explicit DeviceMesh(std::shared_ptr<const State> state);
  friend DeviceMesh init_device_mesh(c10::DeviceType, std::vector<int64_t>,
                                     std::vector<std::string>);
  friend DeviceMesh default_mesh();
  friend c10::Device local_device(const DeviceMesh&);
  friend bool covers(const DeviceMesh&, const DeviceMesh&, int64_t);
  friend std::string to_string(const DeviceMesh&);

  std::shared_ptr<const State> state_;
};

FSDP_API bool operator==(const DeviceMesh& a, const DeviceMesh& b);

// Arranges ranks 0 .. product(shape)-1 of the default group row-major. Initialises the
// default group when nobody has. Collective over the default group. Throws ValueError for
// a bad shape or names, or a mesh that is not the world's size.
[[nodiscard]] FSDP_API DeviceMesh init_device_mesh(c10::DeviceType device_type,
                                                   std::vector<int64_t> shape,
                                                   std::vector<std::string> dim_names = {});

// The mesh {"replicate", "shard"} of hybrid sharding over the default group: the ranks of
// a node, `ranks_per_node` that follow each other, share shards, and those with the same
// place in their nodes are replicas. Collective over the default group. Throws ValueError
// unless ranks_per_node divides the world's size.
[[nodiscard]] FSDP_API DeviceMesh init_hybrid_mesh(c10::DeviceType device_type,
                                                   int64_t ranks_per_node);

// 1-D over the default group, on the accelerator that the process sees and the group
// serves, else CPU. Initialises the default group when nobody has: collective then, local
// else. The same mesh for as long as someone holds it, not another one per call.
FSDP_API DeviceMesh default_mesh();

// Where this rank's tensors are to be: the CPU, or the device of the mesh's type that was
// the calling thread's current one when the mesh was made, with its index. The same on
// all threads, and of all slices of the mesh. Local.
[[nodiscard]] FSDP_API c10::Device local_device(const DeviceMesh& mesh);

// Whether all ranks along dimension `dim` of `part` are ranks of `mesh`. Only meshes that
// were cut, flattened or permuted from one know: false of others, but of the same group.
// Local.
FSDP_API bool covers(const DeviceMesh& mesh, const DeviceMesh& part, int64_t dim);

FSDP_API std::string to_string(const DeviceMesh& mesh);
FSDP_API std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

}  // namespace fsdp

template <>
struct std::hash<fsdp::DeviceMesh> {
  size_t operator()(const fsdp::DeviceMesh& mesh) const { return mesh.hash(); }
};
