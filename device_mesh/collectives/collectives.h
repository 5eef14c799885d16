// The collectives of one process group, which everything above this folder goes through:
// each is announced to the other ranks of the group before it sends (issue_log.h), so
// that ranks that do not issue the same ones in the same order get an error that names
// both.
//
//   const auto collectives = Collectives::of(mesh.group(dim), mesh.device_type());
//   collectives.all_gather({.output = all, .input = own, .what = "all-gather of 'weight'"});
//
// A value. Every method but the local ones is collective over the group: all its ranks
// call in one order, with the same sizes. Those that return nothing return when the
// values are there; on a device, ordered after the current stream, which then waits
// without blocking the host. Tensors are contiguous, need no graph, and must not be
// touched meanwhile. They throw DistBackendError that names `what`, this rank and the
// ranks that did not come, when the backend fails, and an error that names the operations
// of both where ranks issued different ones; after either the group is refused. Wrong
// sizes, dtypes or strides are a ValueError before anything is sent.
#pragma once

#include "device_mesh/collectives/gather.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/pending_all_to_all.h"
#include "device_mesh/collectives/reduce_op.h"
#include "device_mesh/collectives/reduction.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <string>

namespace fsdp::internal {

class IssueLog;

struct AllGatherOptions {
  at::Tensor output;  // group size * input.numel() elements, rank-major
  at::Tensor input;
  std::string what;
};

struct ReduceScatterOptions {
  at::Tensor output;  // one row: the reduction over the ranks of row `rank`
  at::Tensor input;   // group size rows
  std::string what;
  ReduceOp op = ReduceOp::kSum;
};

struct AllReduceOptions {
  at::Tensor tensor;  // in place
  std::string what;
  ReduceOp op = ReduceOp::kSum;
};

struct BroadcastOptions {
  at::Tensor tensor;  // in place
  std::string what;
  int64_t root = 0;  // group rank
};

struct AllToAllOptions {
  at::Tensor output;  // row r comes from rank r
  at::Tensor input;   // row r goes to rank r; rows of one size
  std::string what;
};

struct RowsOptions {
  at::Tensor row;  // of the same shape and dtype on every rank
  std::string what;
  // What all ranks must be in, by name, where their `what` may differ; empty: rows of one
  // size meet.
  std::string call = {};
};

class Collectives {
 public:
  // Those of `group` for tensors of that device type. Local.
  static Collectives of(const Group& group, c10::DeviceType device_type);
  // Those of `side`, another group of the same ranks, with an order of their own
  // (IssueLog::beside). Local.
  Collectives beside(const Group& side) const;

  void all_gather(const AllGatherOptions& options) const;
  void reduce_scatter(const ReduceScatterOptions& options) const;
  void all_reduce(const AllReduceOptions& options) const;
  void broadcast(const BroadcastOptions& options) const;
  void all_to_all(const AllToAllOptions& options) const;
  void barrier(const std::string& what) const;
  // Every rank's row: [ranks, ...]. Small rows travel with the announcement, in one
  // message to each rank.
  at::Tensor rows_of_ranks(const RowsOptions& options) const;
  // uint8, not initialised: memory from which start() sends rows without a copy, where
  // the ranks share memory. Local.
  at::Tensor row_memory(at::IntArrayRef sizes, c10::Device device) const;

  // Announced and posted; do not block.
  std::unique_ptr<Gather> start(const GatherOptions& options) const;
  std::unique_ptr<PendingReduction> start(const SumRowsOptions& options) const;
  std::unique_ptr<PendingReduction> start(const SumRowOptions& options) const;
  std::unique_ptr<PendingAllToAll> start(const AllToAllSplitOptions& options) const;

  // Local.
  const std::shared_ptr<IssueLog>& log() const;
  const Group& group() const;
  int64_t rank() const;  // in the group
  int64_t size() const;

 private:
  struct State;
  explicit Collectives(std::shared_ptr<const State> state);
  bool adds_in_order(const at::Tensor& tensor) const;

  std::shared_ptr<const State> state_;
};

}  // namespace fsdp::internal
