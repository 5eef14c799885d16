// One step of a redistribution: along one mesh dimension, all others staying as they are.
// The table of what is sent is in redistribute.h.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/scalar_agreement.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

class RedistributeStep {
 public:
  // `unsharded_shape`: the local shape once this mesh dimension's cut is undone. `moved`:
  // the DTensor, or null where only a local tensor is known. All outlive it.
  RedistributeStep(const DeviceMesh& mesh, int64_t mesh_dim, std::vector<int64_t> unsharded_shape,
                   const at::Tensor* moved, ScalarAgreement& scalars);

  // This rank's part afterwards. Collective over the mesh dimension, but from Replicate
  // and where nothing changes.
  at::Tensor run(const at::Tensor& local, const Placement& from, const Placement& to);

 private:
  at::Tensor run_part(const at::Tensor& local, const Placement& from, const Placement& to) const;
  at::Tensor moved_terms(const at::Tensor& terms, const Placement& from, const Placement& to) const;
  at::Tensor run_on_atoms(const at::Tensor& local, const Placement& from,
                          const Placement& to) const;
  at::Tensor run_on_units(const at::Tensor& local, const Placement& from,
                          const Placement& to) const;
  at::Tensor gathered_units(const at::Tensor& local, const Shard& cut) const;
  at::Tensor from_owner(const at::Tensor& local, int64_t owner) const;
  RedistributeStep pairs() const;
  at::Tensor moved_as_pairs(const at::Tensor& local, const Placement& from,
                            const Placement& to) const;
  at::Tensor moved(const at::Tensor& local, const Placement& from, const Placement& to) const;
  at::Tensor replicated(const at::Tensor& local, const Placement& from) const;
  at::Tensor own_chunk(const at::Tensor& whole, int64_t dim) const;
  at::Tensor own_term(const at::Tensor& whole, Partial::Op op) const;
  at::Tensor gather(const at::Tensor& local, int64_t dim) const;
  at::Tensor reduce(const at::Tensor& local, Partial::Op op) const;
  at::Tensor reduce_shard(const at::Tensor& local, Partial::Op op, int64_t dim) const;
  at::Tensor all_to_all_shards(const at::Tensor& local, int64_t from, int64_t to) const;
  // `given`: what this rank gives to it.
  template <class Collective>
  void send(CollectiveKind kind, const at::Tensor& given, const Collective& collective) const;

  const DeviceMesh& mesh_;
  ScalarAgreement& scalars_;
  int64_t mesh_dim_;
  Placement from_ = Replicate{}, to_ = Replicate{};  // of the whole step
  Collectives collectives_;
  int64_t parts_;
  int64_t index_;
  std::vector<int64_t> shape_;
  std::string what_;
};

}  // namespace fsdp::internal
