// The collectives of one process group, which everything above this folder goes through:
// each is announced to the other ranks of the group before it sends (issue_log.h), so
// that ranks that do not issue the same ones in the same order get an error that names
// both.
//
//   const auto collectives = Collectives::of(mesh.group(dim), mesh.device_type());
//   collectives.all_gather({.output = all, .input = own, .what = "all-gather of 'weight'"});
//
// A value. Every method but the local ones is collective over the group: all its ranks
// call in one order, with the same sizes. Those but start() return when the values are
// there; on a device, ordered after the current stream, which then waits
// without blocking the host. Tensors are contiguous, need no graph, and must not be
// touched meanwhile. They throw DistBackendError that names `what`, this rank and the
// ranks that did not come, when the backend fails, and an error that names the operations
// of both where ranks issued different ones; after either the group is refused. Wrong
// sizes, dtypes or strides are a ValueError before anything is sent.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/operations.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class IssueLog;
struct IssuedOperation;

class Collectives {
 public:
  // Those of `group` for tensors of that device type. Local.
  static Collectives of(const Group& group, c10::DeviceType device_type);
  // Those of `side`, another group of the same ranks, with an order of their own
  // (IssueLog::beside). Local.
  Collectives beside(const Group& side) const;

  // These give what travelled with it, by group rank: this rank's words alone where
  // nothing is announced, none where there is nothing to send.
  std::vector<NoticeWords> all_gather(const AllGatherOptions& options) const;
  std::vector<NoticeWords> reduce_scatter(const ReduceScatterOptions& options) const;
  std::vector<NoticeWords> all_reduce(const AllReduceOptions& options) const;
  std::vector<NoticeWords> broadcast(const BroadcastOptions& options) const;
  std::vector<NoticeWords> all_to_all(const AllToAllOptions& options) const;
  void barrier(const std::string& what) const;
  // Every rank's row: [ranks, ...]. Small rows travel with the announcement, in one
  // message to each rank.
  at::Tensor rows_of_ranks(const RowsOptions& options) const;
  // uint8, not initialised: memory from which start() sends rows without a copy, where
  // the ranks share memory. Local.
  at::Tensor row_memory(at::IntArrayRef sizes, c10::Device device) const;

  // Announced and posted; do not block.
  InFlight<GatheredRows> start(const AllGatherOptions& options) const;
  InFlight<SummedRow> start(const ReduceScatterOptions& options) const;
  InFlight<SummedRow> start(const AllReduceOptions& options) const;
  // What each rank has sent to this one, to be read only; an error that names both sizes
  // where a rank has sent another one than was expected here.
  InFlight<std::vector<at::Tensor>> start(const AllToAllOptions& options) const;

  // Local.
  const std::shared_ptr<IssueLog>& log() const;
  const Group& group() const;
  int64_t rank() const;  // in the group
  int64_t size() const;

 private:
  struct State;
  explicit Collectives(std::shared_ptr<const State> state);
  std::vector<NoticeWords> gather_into(const at::Tensor& output, const at::Tensor& input,
                                       const IssuedOperation& operation) const;

  std::shared_ptr<const State> state_;
};

}  // namespace fsdp::internal
