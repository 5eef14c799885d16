#include "fully_shard/transport/c10d_transport.h"

#include "fully_shard/transport/row_exchange.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::internal {
namespace {

class ReduceScatterReduction final : public PendingReduction {
 public:
  ReduceScatterReduction(const Group& group, const at::Tensor& rows, at::ScalarType dtype)
      : rows_(rows.narrow(1, 0, rows.size(1) - kStampRoom).view(dtype).contiguous()),
        sum_(at::empty({rows_.size(1)}, rows_.options())),
        pending_(reduce_scatter(group, sum_, rows_.view({-1}), ReduceOp::kSum)) {}

  int64_t staging_bytes() const override {
    return static_cast<int64_t>(rows_.nbytes() + sum_.nbytes());
  }

  ReducedRow wait(const std::string& what) override {
    pending_.wait(what);
    return {sum_.view(at::kByte), {}};
  }

 private:
  at::Tensor rows_, sum_;
  Pending pending_;  // last: waits before the buffers go
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(Group gather_group, Group reduce_group)
      : gather_group_(std::move(gather_group)), reduce_group_(std::move(reduce_group)) {}

  int64_t rank() const override { return group_rank(gather_group_); }
  int64_t world() const override { return group_size(gather_group_); }
  Pending gather(const at::Tensor& output, const at::Tensor& input) override {
    return all_gather(gather_group_, output, input);
  }
  std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype) override {
    if (rows.is_cpu()) return std::make_unique<RowExchange>(reduce_group_, rows, dtype);
    return std::make_unique<ReduceScatterReduction>(reduce_group_, rows, dtype);
  }

 private:
  Group gather_group_, reduce_group_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim) {
  const auto& gather_group = mesh.group(dim);
  return std::make_unique<C10dTransport>(
      gather_group, mesh.size(dim) == 1 ? gather_group : mesh.side_group(dim, "reduce"));
}

}  // namespace fsdp::internal
