#include "dtensor/internal/run_by_ways.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"
#include "dtensor/internal/place_operands.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

bool lies_as(const at::Tensor& local, const std::vector<int64_t>& stride) {
  for (int64_t d = 0; d < local.dim(); ++d) {
    if (local.size(d) != 1 && local.stride(d) != stride[static_cast<size_t>(d)]) return false;
  }
  return true;
}

bool is_contiguous(const TensorLayout& layout) {
  int64_t stride = 1;
  for (size_t d = layout.shape().size(); d-- > 0; stride *= std::max<int64_t>(layout.shape()[d], 1)) {
    if (layout.stride()[d] != stride) return false;
  }
  return true;
}

// `local` with its dimensions in memory in the order of the whole, which must not depend
// on the rank.
at::Tensor in_order_of(const at::Tensor& local, const TensorLayout& whole) {
  if (local.is_contiguous() && is_contiguous(whole)) return local;
  const auto wanted = dense_strides(local.sizes().vec(), whole.stride());
  if (lies_as(local, wanted)) return local;
  return at::empty_strided(local.sizes(), wanted, local.options()).copy_(local);
}

bool is_replicated(const DTensorSpec& spec) {
  return std::all_of(spec.placements().begin(), spec.placements().end(),
                     [](const auto& placement) { return placement.is_replicate(); });
}

at::Tensor replicated_result(const at::Tensor& local, const DeviceMesh& mesh) {
  return make_dtensor(
      local, DTensorSpec(mesh, replicated_on(mesh), local.sizes().vec(), local.strides().vec()));
}

// `spec` is right but for the strides, which are the operator's.
at::Tensor replicated_result(const at::Tensor& local, const DTensorSpec& spec) {
  return lies_as(local, spec.stride()) ? make_dtensor(local, spec)
                                       : replicated_result(local, spec.mesh());
}

// Replaces each tensor among the results of `call`, those of lists one by one, by
// wrap(tensor, its number).
template <class Wrap>
void wrap_results(OperatorCall& call, const Wrap& wrap) {
  size_t number = 0;
  for (size_t i = 0; i < call.handle().schema().returns().size(); ++i) {
    c10::IValue& result = call.result(i);
    if (result.isTensor()) {
      const at::Tensor local = std::move(result).toTensor();
      result = local.defined() ? wrap(local, number) : local;
      ++number;
    } else if (result.isTensorList()) {
      auto tensors = std::move(result).toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = wrap(tensor, number++);
      result = std::move(tensors);
    }
  }
}

void wrap_replicated(OperatorCall& call, const DeviceMesh& mesh) {
  wrap_results(call,
               [&](const at::Tensor& local, size_t) { return replicated_result(local, mesh); });
}

Operands local_operands(at::TensorList operands) {
  Operands locals;
  for (const at::Tensor& operand : operands) locals.push_back(held_part(operand));
  return locals;
}

std::vector<DTensorSpec> placed_specs(at::TensorList operands, const CallPlan& plan,
                                      const DeviceMesh& mesh) {
  std::vector<DTensorSpec> placed;
  placed.reserve(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].defined()) {
      placed.emplace_back(mesh, plan.targets[i], operands[i].sizes().vec(),
                          operands[i].strides().vec());
    } else {
      placed.emplace_back(mesh, replicated_on(mesh), std::vector<int64_t>{});
    }
  }
  return placed;
}

void set_part_arguments(OperatorCall& call, const CallPlan& plan) {
  for (const auto& [place, value] : plan.part_arguments) {
    if (const auto* const numbers = std::get_if<std::vector<int64_t>>(&value)) {
      call.argument(place) = *numbers;
    } else {
      call.argument(place) = std::get<int64_t>(value);
    }
  }
}

}  // namespace

WaysKernel::WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op,
                       RunOnParts run_on_parts)
    : plans_(PlannedOperator(ways, op)), run_on_parts_(run_on_parts) {}

void WaysKernel::run_on_parts(OperatorCall& call, at::TensorList operands, const CallPlan& plan,
                              const DeviceMesh& mesh) const {
  if (run_on_parts_ == nullptr) return call.run_in_place();
  call.finish(run_on_parts_(call, placed_specs(operands, plan, mesh)));
}

void WaysKernel::run(OperatorCall& call) const {
  const PlannedOperator& op = plans_.op();
  const auto operands = op.kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto plan = plans_.plan_of(call, operands, mesh);
  if (op.written.has_value()) check_stays(call, operands[*op.written], plan->targets[*op.written]);
  at::Tensor viewed;
  if (op.is_view) viewed = gathered_for_view(call, operands[0], plan->targets[0]);
  op.kinds.replace_operands(call, !plan->moves ? local_operands(operands)
                                  : op.is_view ? Operands{local_of(viewed)}
                                               : place_operands(call, operands, plan->targets,
                                                                NotedRedistribution::Cause::kWay));
  set_part_arguments(call, *plan);
  run_on_parts(call, operands, *plan, mesh);
  if (op.written.has_value()) return call.finish(operands[*op.written]);
  if (plan->results.empty()) return wrap_replicated(call, mesh);
  wrap_results(call, [&](const at::Tensor& local, size_t i) {
    const DTensorSpec spec(mesh, plan->results[i]);
    if (op.is_view) return make_dtensor_view(viewed, local, spec);
    if (is_replicated(spec)) return replicated_result(local, spec);
    return make_dtensor(in_order_of(local, spec.layout()), spec);
  });
}

void run_replicated(OperatorCall& call) {
  const ArgumentKinds kinds(call.handle().schema());
  const auto operands = kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const std::vector<TensorPlacements> targets(operands.size(), replicated_on(mesh));
  kinds.replace_operands(
      call, place_operands(call, operands, targets, NotedRedistribution::Cause::kNoRule));
  call.run_in_place();
  wrap_replicated(call, mesh);
}

}  // namespace fsdp::internal
