#include "fully_shard/custom_collectives.h"

#include "device_mesh/collectives/collectives.h"
#include "fully_shard/transport/mesh_dims.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <utility>

namespace fsdp {
namespace {

using internal::Group;
using internal::Pending;

// As c10d has it; `finish`, if any, runs when the collective succeeded.
class PendingWork final : public c10d::Work {
 public:
  PendingWork(Pending pending, std::string what, std::function<void()> finish)
      : pending_(std::move(pending)), what_(std::move(what)), finish_(std::move(finish)) {}

  bool isCompleted() override { return pending_.finished(); }
  bool wait(std::chrono::milliseconds) override {
    pending_.wait(what_);
    if (const auto finish = std::exchange(finish_, {})) finish();
    return true;
  }

 private:
  Pending pending_;
  std::string what_;
  std::function<void()> finish_;
};

c10::intrusive_ptr<c10d::Work> work_of(Pending pending, const char* what,
                                       std::function<void()> finish = {}) {
  return c10::make_intrusive<PendingWork>(std::move(pending), what, std::move(finish));
}

Group group_for(const DeviceMesh& mesh, const std::string& purpose) {
  return mesh.side_group(internal::shard_dim_of(mesh), purpose);
}

Pending sum_rows(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  return internal::reduce_scatter(group, output, input, internal::ReduceOp::kSum);
}

}  // namespace

Communicate all_gather_over(const DeviceMesh& mesh) {
  return [group = group_for(mesh, "custom all-gather")](const at::Tensor& output,
                                                        const at::Tensor& input) {
    return work_of(internal::all_gather(group, output, input), "all-gather");
  };
}

Communicate reduce_scatter_over(const DeviceMesh& mesh) {
  return [group = group_for(mesh, "custom reduce-scatter")](const at::Tensor& output,
                                                            const at::Tensor& input) {
    return work_of(sum_rows(group, output, input), "reduce-scatter");
  };
}

Communicate compressed_reduce_scatter(const DeviceMesh& mesh, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kHalf || dtype == at::kBFloat16,
                    "compressed_reduce_scatter: dtype is ", dtype,
                    "; allowed: Half, BFloat16 (rank ", mesh.rank(), ")");
  return [group = group_for(mesh, "custom reduce-scatter"), dtype](const at::Tensor& output,
                                                                   const at::Tensor& input) {
    const auto narrow = input.to(dtype);
    if (narrow.is_same(input)) return work_of(sum_rows(group, output, input), "reduce-scatter");
    const auto sum = at::empty_like(output, output.options().dtype(dtype));
    return work_of(sum_rows(group, sum, narrow), "compressed reduce-scatter",
                   [output, sum, narrow] { output.copy_(sum); });
  };
}

}  // namespace fsdp
