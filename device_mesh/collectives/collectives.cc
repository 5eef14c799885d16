#include "device_mesh/collectives/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/headeronly/version.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroup;

// Of values, not of graphs: views and c10d's operators take several times as long where
// autograd looks at them.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// The collectives of one tensor on each side: LibTorch 2.15 renamed them.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
constexpr auto kAllGather = &ProcessGroup::_allgather_base;
constexpr auto kReduceScatter = &ProcessGroup::_reduce_scatter_base;
constexpr auto kAllToAll = &ProcessGroup::alltoall_base;
#else
constexpr auto kAllGather = &ProcessGroup::all_gather_single;
constexpr auto kReduceScatter = &ProcessGroup::reduce_scatter_single;
constexpr auto kAllToAll = &ProcessGroup::all_to_all_single;
#endif

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown ReduceOp ", static_cast<int>(op));
}

bool is_sum(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; }

// Gloo's reduce-scatter is an all-reduce of a copy of the input, of which all but one row
// is thrown away. Exchanging the rows and adding them here moves half the bytes, needs no
// more memory, and always adds in the order of the ranks.
Pending reduce_scatter_by_exchange(const Group& group, at::Tensor output, at::Tensor input,
                                   ReduceOp op) {
  const int64_t size = group->getSize();
  at::Tensor rows = at::empty({size, output.numel()}, input.options());
  at::Tensor flat_input = input.view({size, -1});
  auto add_rows = [rows, output, size, op]() mutable {
    const BelowAutograd below_autograd;
    at::Tensor flat = output.view({-1});
    at::sum_out(flat, rows, /*dim=*/0);
    if (op == ReduceOp::kAvg) flat.div_(size);
  };
  std::vector<int64_t> equal_rows;
  return issue(
      group, [&] { return ((*group).*kAllToAll)(rows, flat_input, equal_rows, equal_rows, {}); },
      std::move(add_rows));
}

void check_operands(const Group& group, const char* operation, const at::Tensor& whole,
                    const at::Tensor& part) {
  TORCH_CHECK_VALUE(whole.is_contiguous() && part.is_contiguous(), operation,
                    ": tensors must be contiguous (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * group->getSize(), operation, ": ",
                    whole.numel(), " elements, expected ", group->getSize(), " ranks times ",
                    part.numel(), " (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), operation, ": dtypes ",
                    whole.scalar_type(), " and ", part.scalar_type(), " differ (rank ",
                    group->getRank(), ")");
}

at::Tensor flat(const at::Tensor& tensor) { return tensor.dim() == 1 ? tensor : tensor.view({-1}); }

// Backends compare shapes, and Gloo has no complex numbers; the contract here is about
// elements.
at::Tensor elements(const at::Tensor& tensor) {
  return tensor.is_complex() ? flat(at::view_as_real(tensor)) : flat(tensor);
}

}  // namespace

Pending all_gather(const Group& group, at::Tensor output, at::Tensor input) {
  check_operands(group, "all_gather", output, input);
  if (input.numel() == 0) return {};
  const BelowAutograd below_autograd;
  at::Tensor flat_output = elements(output);
  at::Tensor flat_input = elements(input);
  return issue(group, [&] { return ((*group).*kAllGather)(flat_output, flat_input, {}); });
}

Pending reduce_scatter(const Group& group, at::Tensor output, at::Tensor input, ReduceOp op) {
  check_operands(group, "reduce_scatter", input, output);
  if (output.numel() == 0) return {};
  const BelowAutograd below_autograd;
  if (through_gloo(group, input) && is_sum(op) && input.is_floating_point()) {
    return reduce_scatter_by_exchange(group, std::move(output), std::move(input), op);
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(input);
  return issue(group, [&] { return ((*group).*kReduceScatter)(flat_output, flat_input, options); });
}

Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op) {
  if (tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue(group, [&] { return group->allreduce(tensors, options); });
}

Pending broadcast(const Group& group, at::Tensor tensor, int64_t root_group_rank) {
  TORCH_CHECK_VALUE(root_group_rank >= 0 && root_group_rank < group->getSize(), "broadcast: root ",
                    root_group_rank, ", expected 0 to ", group->getSize() - 1, " (rank ",
                    group->getRank(), ")");
  if (tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  c10d::BroadcastOptions options;
  options.rootRank = root_group_rank;
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue(group, [&] { return group->broadcast(tensors, options); });
}

Pending all_to_all(const Group& group, at::Tensor output, at::Tensor input) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() && input.numel() % group->getSize() == 0,
                    "all_to_all: ", output.numel(), " and ", input.numel(),
                    " elements, expected equal multiples of the ", group->getSize(),
                    " ranks (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(),
                    "all_to_all: tensors must be contiguous (rank ", group->getRank(), ")");
  if (input.numel() == 0) return {};
  const BelowAutograd below_autograd;
  at::Tensor output_rows = output.view({group->getSize(), -1});
  at::Tensor input_rows = input.view({group->getSize(), -1});
  std::vector<int64_t> equal_rows;
  return issue(group, [&] {
    return ((*group).*kAllToAll)(output_rows, input_rows, equal_rows, equal_rows, {});
  });
}

void barrier(const Group& group) {
  // Not ProcessGroup::barrier: it keeps its tensor in a function-level static, which
  // ranks that are threads would share.
  c10d::BarrierOptions options;
  if (group->getBackendType() == ProcessGroup::NCCL) {
    options.device = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice();
    options.device_ids = {options.device->index()};
  }
  Pending(group, group->getDefaultBackend()->barrier(options)).wait("barrier");
}

}  // namespace fsdp::internal
