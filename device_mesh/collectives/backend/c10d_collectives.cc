#include "device_mesh/collectives/backend/c10d_collectives.h"

#include "device_mesh/collectives/backend/c10d_names.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/internal/accelerator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroup;

// Of values, not of graphs: views and c10d's operators take several times as long where
// autograd looks at them.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown ReduceOp ", static_cast<int>(op));
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

// What is moved and not added up goes as bytes: backends compare shapes, and Gloo knows
// few dtypes.
at::Tensor flat(const at::Tensor& tensor) { return tensor.dim() == 1 ? tensor : tensor.view({-1}); }

}  // namespace

int tag_of(const Stamp& stamp) {
  constexpr int kMore = kNoticeTag + 1;
  return kMore + static_cast<int>(stamp.history >> 35);  // 29 bits
}

bool better_by_messages(const Group& group, const at::Tensor& memory) {
  return memory.is_cpu() && (group_size(group) == 1 || has_gloo(group));
}

Pending send(const Group& group, at::Tensor bytes, int64_t to, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  auto pending = issue(group, [&] { return group->send(tensors, static_cast<int>(to), tag); });
  pending.with_peer(to);
  return pending;
}

Pending receive(const Group& group, at::Tensor bytes, int64_t from, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  auto pending = issue(group, [&] { return group->recv(tensors, static_cast<int>(from), tag); });
  pending.with_peer(from);
  return pending;
}

void check_gather(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  check_operands(group, "all_gather", output, input);
}

void check_reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  check_operands(group, "reduce_scatter", input, output);
}

void check_broadcast(const Group& group, int64_t root_group_rank) {
  TORCH_CHECK_VALUE(root_group_rank >= 0 && root_group_rank < group->getSize(), "broadcast: root ",
                    root_group_rank, ", expected 0 to ", group->getSize() - 1, " (rank ",
                    group->getRank(), ")");
}

void check_all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() && input.numel() % group->getSize() == 0,
                    "all_to_all: ", output.numel(), " and ", input.numel(),
                    " elements, expected equal multiples of the ", group->getSize(),
                    " ranks (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(),
                    "all_to_all: tensors must be contiguous (rank ", group->getRank(), ")");
}

Pending all_gather(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  check_gather(group, output, input);
  if (input.numel() == 0) return {};
  const BelowAutograd below_autograd;
  at::Tensor to = tensor_bytes(output);
  at::Tensor from = tensor_bytes(input);
  return issue_on(to.device(), group, [&] { return ((*group).*kAllGather)(to, from, {}); });
}

Pending reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op) {
  check_reduce_scatter(group, output, input);
  if (output.numel() == 0) return {};
  const BelowAutograd below_autograd;
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
  at::Tensor flat_output = flat(output);
  at::Tensor flat_input = flat(input);
  return issue_on(output.device(), group,
                  [&] { return ((*group).*kReduceScatter)(flat_output, flat_input, options); });
}

Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op) {
  if (tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue_on(tensors[0].device(), group, [&] { return group->allreduce(tensors, options); });
}

Pending broadcast(const Group& group, const at::Tensor& tensor, int64_t root_group_rank) {
  check_broadcast(group, root_group_rank);
  if (tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  c10d::BroadcastOptions options;
  options.rootRank = root_group_rank;
  std::vector<at::Tensor> tensors{tensor_bytes(tensor)};
  return issue_on(tensor.device(), group, [&] { return group->broadcast(tensors, options); });
}

Pending all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  check_all_to_all(group, output, input);
  if (input.numel() == 0) return {};
  const BelowAutograd below_autograd;
  at::Tensor output_rows = tensor_bytes(output).view({group->getSize(), -1});
  at::Tensor input_rows = tensor_bytes(input).view({group->getSize(), -1});
  std::vector<int64_t> equal_rows;
  return issue_on(output.device(), group, [&] {
    return ((*group).*kAllToAll)(output_rows, input_rows, equal_rows, equal_rows, {});
  });
}

Pending all_to_all_of_sizes(const Group& group, const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  const BelowAutograd below_autograd;
  at::Tensor received = output;
  at::Tensor sent = input;
  std::vector<int64_t> output_sizes = from;
  std::vector<int64_t> input_sizes = to;
  return issue_on(output.device(), group, [&] {
    return ((*group).*kAllToAll)(received, sent, output_sizes, input_sizes, {});
  });
}

Pending barrier(const Group& group) {
  // Not ProcessGroup::barrier: it keeps its tensor in a function-level static, which
  // ranks that are threads would share.
  c10d::BarrierOptions options;
  for (const auto& served : group->getDeviceTypes()) {
    const auto device = current_device(served.type());
    if (!device.has_index()) continue;
    options.device = device;
    options.device_ids = {device.index()};
    break;
  }
  return issue(group, [&] { return group->getDefaultBackend()->barrier(options); });
}

}  // namespace fsdp::internal
