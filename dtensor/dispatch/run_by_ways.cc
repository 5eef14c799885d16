#include "dtensor/dispatch/run_by_ways.h"

#include "dtensor/dispatch/gathered_view.h"
#include "dtensor/dispatch/place_operands.h"
#include "dtensor/dispatch/run_on_whole.h"
#include "dtensor/dispatch/wrap_results.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/movement.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

Operands local_operands(at::TensorList operands) {
  Operands locals;
  for (const at::Tensor& operand : operands) locals.push_back(held_part(operand));
  return locals;
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

// Where no part stays, no way was good for anything.
MovementCause cause_of(const CallPlan& plan) {
  const bool keeps_parts =
      std::any_of(plan.targets.begin(), plan.targets.end(), [](const auto& placements) {
        return std::any_of(placements.begin(), placements.end(),
                           [](const auto& placement) { return !placement.is_replicate(); });
      });
  return keeps_parts ? MovementCause::kRule : MovementCause::kWhole;
}

Operands placed_operands(at::TensorList operands, const CallPlan& plan) {
  const CauseOfMovement cause(cause_of(plan));
  return place_operands(operands, plan.targets);
}

// Whether what is written may stay where it lies.
bool stays(const at::Tensor& written, const TensorPlacements& target) {
  return !is_dtensor(written) || spec_of(written).placements() == target;
}

}  // namespace

WaysKernel::WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op,
                       RunOnParts run_on_parts)
    : plans_(PlannedOperator(ways, op)), run_on_parts_(std::move(run_on_parts)) {}

void WaysKernel::run(OperatorCall& call) const {
  const PlannedOperator& op = plans_.op();
  const auto operands = op.kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto plan = plans_.plan_of(call, operands, mesh);
  if (op.written.has_value() && !stays(operands[*op.written], plan->targets[*op.written]))
    return run_on_whole(call);
  at::Tensor viewed;
  if (op.is_view) {
    const bool is_gathered = plan->moves && must_move(spec_of(operands[0]), plan->targets[0]);
    if (is_gathered && view_of_member(call, operands[0])) return;
    viewed = is_gathered ? gathered_for_view(operands[0], plan->targets[0]) : operands[0];
  }
  op.kinds.replace_operands(call, !plan->moves ? local_operands(operands)
                                  : op.is_view ? Operands{local_of(viewed)}
                                               : placed_operands(operands, *plan));
  set_part_arguments(call, *plan);
  if (run_on_parts_ == nullptr) {
    call.run_in_place();
  } else {
    call.finish(run_on_parts_(call, {mesh, *plan}));
  }
  if (op.written.has_value()) return call.finish(operands[*op.written]);
  wrap_results(call, [&](const at::Tensor& local, size_t i) {
    if (plan->results.empty()) return replicated_result(local, mesh);
    const DTensorSpec spec(mesh, plan->results[i]);
    return op.is_view ? make_dtensor_view(viewed, local, spec) : result_over(local, spec);
  });
}

}  // namespace fsdp::internal
