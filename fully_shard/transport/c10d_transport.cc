#include "fully_shard/transport/c10d_transport.h"

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "fully_shard/transport/c10d_all_reduce.h"
#include "fully_shard/transport/c10d_gather.h"
#include "fully_shard/transport/c10d_reduction.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::internal {
namespace {

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

class C10dTransport final : public Transport {
 public:
  C10dTransport(const DeviceMesh& mesh, int64_t dim)
      : gather_group_(mesh.group(dim)),
        reduce_group_(mesh.size(dim) == 1 ? gather_group_
                                          : mesh.side_group(dim, reductions_on(mesh))),
        gather_log_(IssueLog::of(mesh, dim)),
        reduce_log_(gather_log_->beside(reduce_group_)),
        on_cpu_(mesh.device_type() == c10::kCPU) {}

  int64_t shard_rank() const override { return group_rank(gather_group_); }
  int64_t shard_count() const override { return group_size(gather_group_); }

  at::Tensor shard_memory(int64_t bytes, c10::Device device) override {
    return at::zeros({bytes}, bytes_on(device));
  }
  at::Tensor row_memory(int64_t row_bytes, c10::Device device) override {
    return scratch_memory({shard_count(), row_bytes}, at::kByte, device);
  }

  std::unique_ptr<Gather> gather(const at::Tensor& shards, const Issue& issue) override {
    return issue_c10d_gather(
        gather_log_, operation_of(CollectiveKind::kAllGather, "all-gather", shards.numel(), issue),
        gather_group_, shards, issue.custom);
  }

  std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                           const Issue& issue) override {
    return issue_c10d_reduction(
        reduce_log_,
        operation_of(CollectiveKind::kReduceScatter, "reduce-scatter", rows.size(1), issue),
        reduce_group_, rows, dtype, issue.custom);
  }

  std::unique_ptr<PendingReduction> all_reduce(at::Tensor row, const Issue& issue) override {
    return issue_c10d_all_reduce(reduce_log_,
                                 operation_of(CollectiveKind::kAllReduce, "all-reduce",
                                              static_cast<int64_t>(row.nbytes()), issue),
                                 reduce_group_, row);
  }

  bool checks_stamps() const override { return on_cpu_; }
  bool reads_flags() const override { return on_cpu_; }

 private:
  // Meshes that share a dimension reduce over it each in its own order.
  static std::string reductions_on(const DeviceMesh& mesh) {
    std::string purpose = "reduce";
    if (mesh.ndim() > 1) {
      for (const auto& name : mesh.dim_names()) purpose += "/" + name;
    }
    return purpose;
  }
  static IssuedOperation operation_of(CollectiveKind kind, const char* name, int64_t bytes,
                                      const Issue& issue) {
    return {.kind = kind,
            .unit = issue.unit,
            .what = name + (" of unit '" + issue.unit_name) + "'",
            .bytes = bytes,
            .agreement = issue.agreement};
  }

  Group gather_group_, reduce_group_;
  std::shared_ptr<IssueLog> gather_log_, reduce_log_;
  bool on_cpu_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim) {
  return std::make_unique<C10dTransport>(mesh, dim);
}

}  // namespace fsdp::internal
