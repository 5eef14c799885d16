// Tensors on their way to the ranks that compute with them whole, and results on their
// way back. Along one mesh dimension after another, the last one first, each row of ranks
// sends what it has to the one that is in line with the owner; results go the other way.
// Nothing is padded: each pair of ranks exchanges what it has to
// (collectives/operations.h).
//
//   OwnerExchange exchange(mesh, tensors, "Muon, bucket 0");
//   exchange.start(parts);                       // this rank's, one per tensor
//   auto wholes = exchange.wait();               // those that it owns; undefined: others
//   exchange.start_back(results_of(wholes));
//   auto results = exchange.wait_back();         // this rank's parts again
//
// All four are collective over the mesh, in one order on all ranks; both start functions
// return when the first row was issued, so that others travel while one is computed with.
#pragma once

#include "device_mesh/collectives/operations.h"
#include "device_mesh/device_mesh.h"
#include "optim/internal/owners.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class Received;

struct OwnedTensor {
  TensorLayout layout;         // over the mesh; without Partial
  std::vector<int64_t> owner;  // coordinate of the rank that computes with it
  at::ScalarType dtype = at::kBFloat16;
};

class OwnerExchange {
 public:
  // `what`: in errors; ranks whose tensors, owners or dtypes differ get an error.
  OwnerExchange(DeviceMesh mesh, std::vector<OwnedTensor> tensors, const std::string& what);

  // parts: contiguous and plain, as their layouts have them at this rank.
  void start(std::vector<at::Tensor> parts);
  std::vector<at::Tensor> wait();
  // wholes: of the tensors that this rank owns, of their dtype; others are not looked at.
  void start_back(std::vector<at::Tensor> wholes);
  std::vector<at::Tensor> wait_back();

  bool is_owner(size_t tensor) const;
  // So far: exchanges that were issued, and what came by them from other ranks.
  int64_t issued() const { return issued_; }
  int64_t received_bytes() const { return received_bytes_; }

 private:
  // One tensor along one mesh dimension.
  struct Row {
    PartsAlong parts;
    bool takes_part;  // this rank: further dimensions bring it to the owner
  };
  enum class Way { kToOwners, kBack };

  size_t dims() const { return rows_.size(); }
  bool has_others(size_t dim) const { return mesh_.size(static_cast<int64_t>(dim)) > 1; }
  int64_t own_index(size_t dim) const;
  // What this rank sends to coordinate `to` of the row, and gets from `from` of it.
  std::vector<at::Tensor> sent_to(size_t dim, Way way, int64_t to) const;
  int64_t bytes_from(size_t dim, Way way, int64_t from) const;
  void issue(size_t dim, Way way);
  void arrive(size_t dim, Way way);
  // This rank's, now that the row has come: undefined where another one is in line.
  at::Tensor whole_of(size_t tensor, size_t dim, Received& received) const;
  at::Tensor part_of(size_t tensor, size_t dim, Received& received) const;

  const DeviceMesh mesh_;
  const std::vector<OwnedTensor> tensors_;
  std::vector<std::vector<Row>> rows_;  // by mesh dimension, by tensor
  std::string what_;
  std::vector<at::Tensor> here_;  // what this rank has of each now; undefined: nothing
  std::optional<InFlight<std::vector<at::Tensor>>> in_flight_;
  int64_t issued_ = 0, received_bytes_ = 0;
};

}  // namespace fsdp::internal
