// A DTensor is an at::Tensor of global shape of which each rank of a mesh holds a part.
//
//   auto weight = fsdp::distribute_tensor(full, mesh, {fsdp::Shard{0}});
//   weight.sizes();                              // the global shape
//   at::Tensor rows = weight.to_local();         // this rank's
//   at::Tensor whole = weight.full_tensor();     // everything, on every rank
//
// Operators work on DTensors: on parts where a placement strategy fits, else on the whole
// value (docs/design/dtensor.md lists what happens). A plain tensor beside a DTensor
// counts as replicated, but not beside what comes from a parameter of fully_shard
// (fully_shard/fully_shard.h). A DTensor has no storage of its own: raw access throws.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>
#include <vector>

namespace fsdp {

[[nodiscard]] FSDP_API bool is_dtensor(const at::Tensor& tensor);

struct ToLocalOptions {
  // How the gradient of what is handed out lies on the mesh: this rank's part of it, a
  // copy, or a term of a sum or average. Default: as the DTensor, whole (Replicate) where
  // that is Partial.
  std::optional<std::vector<Placement>> grad_placements = {};
};

// A view of an at::Tensor that is distributed; no extra state.
class FSDP_API DTensor : public at::Tensor {
 public:
  explicit DTensor(const at::Tensor& tensor);  // throws TypeError unless is_dtensor(tensor)

  // This rank's part; shares memory. Local. Differentiable: the gradient that arrives at
  // it is taken for this rank's part of the DTensor's. So of a replicated weight that
  // each rank uses on data of its own, every rank would keep the gradient of its own
  // data: say that it is a term of the sum,
  //
  //   at::Tensor own = weight.to_local({.grad_placements = {{fsdp::Partial{}}}});
  //
  // Throws ValueError for grad_placements that do not fit the mesh, that give this rank a
  // part of another shape, or that are a minimum, maximum or product.
  [[nodiscard]] at::Tensor to_local(const ToLocalOptions& options = {}) const;
  // The whole value as a plain tensor. Collective over the mesh. Differentiable: its
  // gradient counts as the same on all ranks, or as `options` say (see to_local()).
  [[nodiscard]] at::Tensor full_tensor(const ToLocalOptions& options = {}) const;
  // The same value with other placements. Collective over the mesh dimensions that
  // change. Differentiable.
  [[nodiscard]] DTensor redistribute(std::vector<Placement> placements) const;

  const DeviceMesh& device_mesh() const;
  const std::vector<Placement>& placements() const;
};

// Shape, placements, mesh and this rank's part. Local. (Printing it as an at::Tensor
// throws: raw access.)
FSDP_API std::ostream& operator<<(std::ostream& out, const DTensor& dtensor);

// Every rank passes the same full tensor; each keeps its part (a copy). Local: nothing is
// sent. Throws ValueError for placements that do not fit the mesh or the tensor, or are
// Partial.
[[nodiscard]] FSDP_API DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                                 std::vector<Placement> placements);

// The whole value as a plain tensor: of a DTensor, or `tensor` itself if it is plain.
// Collective over a DTensor's mesh. Differentiable.
[[nodiscard]] FSDP_API at::Tensor full_tensor(const at::Tensor& tensor);

struct FromLocalOptions {
  std::optional<std::vector<int64_t>> shape =
      {};  // global; default: even shards of this rank's size
  std::optional<std::vector<int64_t>> stride = {};  // global; default: contiguous
  bool check = false;  // compare shapes across the mesh (collective) and throw on mismatch
};
// Wraps what each rank already holds; shares memory. Local unless check. Differentiable,
// but for Partial min, max and product (NotImplementedError). A term of a Partial sum
// gets the whole gradient, one of an average its part.
[[nodiscard]] FSDP_API DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                          std::vector<Placement> placements,
                                          FromLocalOptions options = {});

}  // namespace fsdp
