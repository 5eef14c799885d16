#include "dtensor/families/pointwise.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/place_operands.h"
#include "dtensor/internal/plan_key.h"
#include "dtensor/internal/shard_layout.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kRememberedPlans = 4096;

const at::Tensor& first_dtensor(const std::vector<at::Tensor>& operands) {
  return *std::find_if(operands.begin(), operands.end(), is_dtensor);
}

// The common case: one spec for all, nothing Partial.
bool all_lie_alike(const PointwiseProblem& problem) {
  const DTensorSpec& spec = spec_of(first_dtensor(problem.operands));
  for (const at::Tensor& operand : problem.operands) {
    if (is_dtensor(operand) ? spec_of(operand) != spec : operand.dim() > 0) return false;
  }
  const bool writes_plain =
      problem.written.has_value() && !is_dtensor(problem.operands[*problem.written]);
  return !writes_plain &&
         std::none_of(spec.placements().begin(), spec.placements().end(),
                      [](const auto& placement) { return placement.is_partial(); });
}

// The spec of a new result that lies like `model`, without gaps.
DTensorSpec dense_spec(const at::Tensor& model) {
  const DTensorSpec& spec = spec_of(model);
  if (model.is_non_overlapping_and_dense()) return spec;
  return spec.with_geometry(spec.shape(), dense_strides(spec.shape(), spec.stride()));
}

PointwisePlan plan_alike(const PointwiseProblem& problem) {
  PointwisePlan plan{.result = dense_spec(first_dtensor(problem.operands)), .locals = {}};
  plan.locals.reserve(problem.operands.size());
  for (const at::Tensor& operand : problem.operands) {
    plan.locals.push_back(is_dtensor(operand) ? local_of(operand) : operand);
  }
  return plan;
}

struct RememberedPlan {
  Propagation placements;
  ResultGeometry result;
};

RememberedPlan make_plan(const PointwiseProblem& problem, const DeviceMesh& mesh) {
  const CallGeometry geometry{.operands = geometry_of(problem.operands), .plain = {}};
  CallPlacements placements = placements_of(problem.operands, mesh);
  placements.written = problem.written;
  const auto ways = [&](const CallGeometry& call) {
    return pointwise_ways(call, problem.linearity);
  };
  return {.placements = propagate(ways, geometry, placements, 1),
          .result = pointwise_result(geometry)};
}

std::shared_ptr<const RememberedPlan> plan_of(const PointwiseProblem& problem,
                                              const DeviceMesh& mesh) {
  static auto* const memo = new BoundedMemo<RememberedPlan>(kRememberedPlans);
  const int64_t written = problem.written.has_value() ? static_cast<int64_t>(*problem.written) : -1;
  MemoKey key =
      plan_key(mesh, problem.operands, {static_cast<int64_t>(problem.linearity), written});
  if (auto known = memo->find(key)) return known;
  return memo->remember(std::move(key), make_plan(problem, mesh));
}

void check_shapes(const PointwiseProblem& problem) {
  std::vector<int64_t> shape;
  for (const at::Tensor& operand : problem.operands) shape = at::infer_size(shape, operand.sizes());
  TORCH_CHECK_VALUE(!problem.written.has_value() ||
                        at::IntArrayRef(shape) == problem.operands[*problem.written].sizes(),
                    problem.call.description(), ": the result's shape ", at::IntArrayRef(shape),
                    " does not fit the tensor it is written to");
}

}  // namespace

PointwiseOperands::PointwiseOperands(const OperatorCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.traits().written.size() <= 1, call.description(), ": no sharding rule for ",
      "operators with several outputs written in place; use the functional form");
  for (size_t i = 0; i < call.argument_count(); ++i) {
    const c10::IValue& argument = call.argument(i);
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    if (!call.traits().written.empty() && call.traits().written[0] == i) written = tensors.size();
    arguments.push_back(i);
    tensors.push_back(argument.toTensor());
  }
}

PointwisePlan plan_pointwise(const PointwiseProblem& problem) {
  if (all_lie_alike(problem)) return plan_alike(problem);
  const DeviceMesh mesh = common_mesh(problem.call, problem.operands);
  check_shapes(problem);
  const auto plan = plan_of(problem, mesh);
  if (problem.written.has_value()) {
    const size_t written = *problem.written;
    check_stays(problem.call, problem.operands[written], plan->placements.operands[written]);
  }
  auto locals = place_operands(problem.call, problem.operands, plan->placements.operands,
                               NotedRedistribution::Cause::kWay);
  const ResultGeometry& result = plan->result;
  return {.result = DTensorSpec(mesh, plan->placements.results[0], result.shape, result.stride),
          .locals = std::move(locals)};
}

void run_pointwise(OperatorCall& call, const PointwiseOperands& operands, PointwisePlan plan) {
  for (size_t i = 0; i < operands.arguments.size(); ++i) {
    call.argument(operands.arguments[i]) = std::move(plan.locals[i]);
  }
  auto results = call.run();
  for (size_t i = 0; i < results.size(); ++i) {
    if (call.traits().returned_argument[i].has_value()) {
      results[i] = operands.tensors[*operands.written];
    } else {
      results[i] = make_dtensor(results[i].toTensor(), plan.result);
    }
  }
  call.finish(std::move(results));
}

}  // namespace fsdp::internal
