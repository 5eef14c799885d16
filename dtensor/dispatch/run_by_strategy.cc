#include "dtensor/dispatch/run_by_strategy.h"

#include "dtensor/dispatch/gathered_view.h"
#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

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

// What follows is for run_on_whole().

// Which operands the operator writes in place that are DTensors.
std::vector<size_t> written_dtensors(const OperatorCall& call, const ArgumentKinds& kinds,
                                     const Operands& operands) {
  const auto& arguments = call.traits().written;
  const auto argument_of = kinds.arguments_of_operands(call);
  std::vector<size_t> written;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (is_dtensor(operands[i]) &&
        std::count(arguments.begin(), arguments.end(), argument_of[i]) > 0)
      written.push_back(i);
  }
  return written;
}

void check_keeps_its_shape(const OperatorCall& call, const DTensorSpec& spec) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.handle().hasTag(at::Tag::inplace_view), call.description(),
      " changes the shape of a DTensor in place; make a new tensor instead (rank ",
      spec.mesh().rank(), ")");
}

void keep_part(const OperatorCall& call, const at::Tensor& dtensor, const at::Tensor& whole) {
  const DTensorSpec& spec = spec_of(dtensor);
  TORCH_CHECK_NOT_IMPLEMENTED(whole.sizes() == dtensor.sizes(), call.name(), ": a DTensor of ",
                              to_string(spec), " would become one of shape ", whole.sizes(),
                              ", but keeps its shape (rank ", spec.mesh().rank(), ")");
  local_of(dtensor).copy_(placed_whole(whole, spec));
}

// What was written is handed back as it was given.
void hand_back(OperatorCall& call, const torch::jit::Stack& given, const DeviceMesh& mesh) {
  wrap_results(call,
               [&](const at::Tensor& local, size_t) { return replicated_result(local, mesh); });
  const auto& returned = call.traits().returned_argument;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (returned[i].has_value()) call.result(i) = given[*returned[i]];
  }
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

void run_on_whole(OperatorCall& call) {
  const CommCauseScope cause(CommCause::kWhole);
  const ArgumentKinds kinds(call.handle().schema());
  const torch::jit::Stack given = call.arguments();
  const auto operands = kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto written = written_dtensors(call, kinds, operands);
  for (const size_t i : written) check_keeps_its_shape(call, spec_of(operands[i]));
  const std::vector<TensorPlacements> targets(operands.size(), replicated_on(mesh));
  auto wholes = place_operands(operands, targets);
  for (const size_t i : written) {
    if (wholes[i].is_same(local_of(operands[i]))) wholes[i] = wholes[i].clone();
  }
  kinds.replace_operands(call, wholes);
  call.run_in_place();
  for (const size_t i : written) keep_part(call, operands[i], wholes[i]);
  hand_back(call, given, mesh);
}

}  // namespace fsdp::internal
