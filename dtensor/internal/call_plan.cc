#include "dtensor/internal/call_plan.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/meta_results.h"
#include "dtensor/internal/place_operands.h"
#include "dtensor/internal/plan_key.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kPlansPerOperator = 1024;

bool all_replicated(const std::vector<TensorPlacements>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& placements) {
    return std::all_of(placements.begin(), placements.end(),
                       [](const auto& placement) { return placement.is_replicate(); });
  });
}

bool is_list(const c10::Argument& result) {
  return result.type()->kind() == c10::TypeKind::ListType;
}

std::optional<size_t> written_operand(const OperatorTraits& traits, const ArgumentKinds& kinds) {
  if (traits.written.empty()) return std::nullopt;
  return kinds.operand_at(traits.written[0]);
}

bool aliases_its_operand(const c10::FunctionSchema& schema) {
  const auto* const alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  return alias != nullptr && !alias->isWrite();
}

std::vector<TensorLayout> layouts_on(const DeviceMesh& mesh,
                                     const std::vector<TensorPlacements>& placements,
                                     const std::vector<ResultGeometry>& geometry) {
  std::vector<TensorLayout> layouts;
  for (size_t i = 0; i < geometry.size(); ++i) {
    layouts.push_back(
        DTensorSpec(mesh, placements[i], geometry[i].shape, geometry[i].stride).layout());
  }
  return layouts;
}

// Of absent operands a number's.
std::vector<ResultGeometry> geometry_of_each(const CallGeometry& call) {
  std::vector<ResultGeometry> geometry;
  for (const Operand& operand : call.operands) geometry.push_back({operand.shape, operand.stride});
  return geometry;
}

void check_fits(const OperatorCall& call, const ResultGeometry& result, const at::Tensor& written) {
  TORCH_CHECK_VALUE(at::IntArrayRef(result.shape) == written.sizes(), call.description(),
                    ": the result's shape ", at::IntArrayRef(result.shape),
                    " does not fit the tensor it is written to");
}

}  // namespace

PlannedOperator::PlannedOperator(OperatorWays of, const c10::OperatorHandle& op)
    : ways(std::move(of)),
      kinds(op.schema()),
      written(written_operand(OperatorTraits(op), kinds)),
      results(op.schema().returns().size()),
      returns_a_list(results == 1 && is_list(op.schema().returns()[0])),
      is_view(aliases_its_operand(op.schema())) {}

PlannedOperator::PlannedOperator(OperatorWays of, std::optional<size_t> in_place)
    : ways(std::move(of)), written(in_place) {}

CallPlans::CallPlans(PlannedOperator op) : op_(std::move(op)), memo_(kPlansPerOperator) {}

std::shared_ptr<const CallPlan> CallPlans::plan_of(const OperatorCall& call,
                                                   at::TensorList operands,
                                                   const DeviceMesh& mesh) const {
  thread_local MemoKey key;  // its memory stays
  key.clear();
  append_plan_key(call, op_.kinds, operands, mesh, key);
  if (auto known = memo_.find(key)) return known;
  return memo_.remember(key, make(call, operands, mesh));
}

std::vector<ResultGeometry> CallPlans::results_of(const OperatorCall& call,
                                                  const CallGeometry& geometry) const {
  return op_.ways.results ? op_.ways.results(geometry) : meta_results(call, op_.kinds);
}

CallPlan CallPlans::make(const OperatorCall& call, at::TensorList operands,
                         const DeviceMesh& mesh) const {
  const CallGeometry geometry{.operands = geometry_of(operands), .plain = op_.kinds.plain_of(call)};
  std::vector<ResultGeometry> results;
  if (op_.returns_a_list) results = results_of(call, geometry);
  CallPlacements placements = placements_of(operands, mesh);
  placements.written = op_.written;
  const size_t count = op_.returns_a_list ? results.size() : op_.results;
  const auto propagation = propagate(op_.ways.ways, geometry, placements, count);
  CallPlan plan{.targets = propagation.operands,
                .moves = propagation.operands != placements.operands,
                .results = {},
                .part_arguments = {},
                .arrived = {}};
  for (const at::Tensor& operand : operands) {
    if (is_dtensor(operand)) plan.arrived.push_back(spec_of(operand).layout());
  }
  if (op_.written.has_value()) {
    if (op_.ways.results) check_fits(call, results_of(call, geometry)[0], operands[*op_.written]);
    return plan;
  }
  const bool is_known = op_.ways.results || op_.is_view;
  if (all_replicated(plan.targets) && !is_known) return plan;
  if (results.empty()) results = results_of(call, geometry);
  plan.results = layouts_on(mesh, propagation.results, results);
  if (op_.ways.part_arguments) {
    const PlacedCall placed{.operands = layouts_on(mesh, plan.targets, geometry_of_each(geometry)),
                            .results = plan.results,
                            .coordinate = mesh.coordinate()};
    plan.part_arguments = op_.ways.part_arguments(geometry, placed);
  }
  return plan;
}

}  // namespace fsdp::internal
