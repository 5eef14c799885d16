#include "dtensor/dispatch/run_by_strategy.h"

#include "dtensor/dispatch/gathered_view.h"
#include "dtensor/dispatch/place_operands.h"
#include "dtensor/dispatch/run_on_whole.h"
#include "dtensor/dispatch/wrap_results.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
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

void set_part_arguments(OperatorCall& call, const OutputSharding& sharding) {
  for (const auto& [place, value] : sharding.part_arguments) {
    if (const auto* const numbers = std::get_if<std::vector<int64_t>>(&value)) {
      call.argument(place) = *numbers;
    } else {
      call.argument(place) = std::get<int64_t>(value);
    }
  }
}

// Where no part stays, no strategy fitted.
CommCause cause_of(const OutputSharding& sharding) {
  const bool keeps_parts =
      std::any_of(sharding.targets.begin(), sharding.targets.end(), [](const auto& placements) {
        return std::any_of(placements.begin(), placements.end(),
                           [](const auto& placement) { return !placement.is_replicate(); });
      });
  return keeps_parts ? CommCause::kRule : CommCause::kWhole;
}

Operands placed_operands(at::TensorList operands, const OutputSharding& sharding) {
  const CommCauseScope cause(cause_of(sharding));
  return place_operands(operands, sharding.targets);
}

// Whether what is written may stay where it lies.
bool stays(const at::Tensor& written, const TensorPlacements& target) {
  return !is_dtensor(written) || spec_of(written).placements() == target;
}

// What is made of a DTensor stays where that is.
void check_device(const OperatorCall& call, const c10::IValue& given) {
  if (given.isNone()) return;
  const auto own = call.argument(0).toTensor().device().type();
  TORCH_CHECK_NOT_IMPLEMENTED(given.toDevice().type() == own, call.description(),
                              ": a DTensor stays on its mesh's device type, ", own, ", got ",
                              given.toDevice(), ". Move .to_local() or .full_tensor() instead.");
}

}  // namespace

StrategyKernel::StrategyKernel(const OpStrategy& strategy, const c10::OperatorHandle& op,
                               LocalKernel local_kernel)
    : propagator_(PlannedOperator(strategy, op)), local_kernel_(std::move(local_kernel)) {}

void StrategyKernel::run(OperatorCall& call) const {
  const PlannedOperator& op = propagator_.op();
  const auto operands = op.kinds.operands_of(call);
  if (op.kinds.device().has_value()) check_device(call, call.argument(*op.kinds.device()));
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto sharding = propagator_.sharding_of(call, operands, mesh);
  if (op.written.has_value() && !stays(operands[*op.written], sharding->targets[*op.written]))
    return run_on_whole(call);
  at::Tensor viewed;
  if (op.is_view) {
    const bool is_gathered =
        sharding->moves && must_move(spec_of(operands[0]), sharding->targets[0]);
    if (is_gathered && view_of_member(call, operands[0])) return;
    viewed = is_gathered ? gathered_for_view(operands[0], sharding->targets[0]) : operands[0];
  }
  op.kinds.replace_operands(call, !sharding->moves ? local_operands(operands)
                                  : op.is_view     ? Operands{local_of(viewed)}
                                                   : placed_operands(operands, *sharding));
  set_part_arguments(call, *sharding);
  if (local_kernel_ == nullptr) {
    call.run_in_place();
  } else {
    call.finish(local_kernel_(call, {mesh, *sharding}));
  }
  if (op.written.has_value()) return call.finish(operands[*op.written]);
  wrap_results(call, [&](const at::Tensor& local, size_t i) {
    if (sharding->results.empty()) return replicated_result(local, mesh);
    const DTensorSpec spec(mesh, sharding->results[i]);
    return op.is_view ? make_dtensor_view(viewed, local, spec) : result_over(local, spec);
  });
}

}  // namespace fsdp::internal
