#include "dtensor/internal/run_by_ways.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/meta_results.h"
#include "dtensor/internal/place_operands.h"
#include "dtensor/internal/plan_key.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kPlansPerOperator = 1024;

bool is_replicated_list(const TensorPlacements& placements) {
  return std::all_of(placements.begin(), placements.end(),
                     [](const auto& placement) { return placement.is_replicate(); });
}

// `local` with its dimensions in memory in the order of the whole, which must not depend
// on the rank.
at::Tensor in_order_of(const at::Tensor& local, const ResultGeometry& whole) {
  const auto wanted = dense_strides(local.sizes().vec(), whole.stride);
  for (int64_t d = 0; d < local.dim() && local.numel() > 0; ++d) {
    if (local.size(d) == 1 || local.stride(d) == wanted[static_cast<size_t>(d)]) continue;
    at::Tensor copy = at::empty_strided(local.sizes(), wanted, local.options());
    return copy.copy_(local);
  }
  return local;
}

at::Tensor replicated_result(const at::Tensor& local, const DeviceMesh& mesh) {
  return make_dtensor(
      local, DTensorSpec(mesh, replicated_on(mesh), local.sizes().vec(), local.strides().vec()));
}

void wrap_replicated(std::vector<c10::IValue>& results, const DeviceMesh& mesh) {
  for (c10::IValue& result : results) {
    if (result.isTensor() && result.toTensor().defined()) {
      result = replicated_result(result.toTensor(), mesh);
    } else if (result.isTensorList()) {
      auto tensors = result.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = replicated_result(tensor, mesh);
      result = std::move(tensors);
    }
  }
}

void wrap(std::vector<c10::IValue>& results, const std::vector<ResultGeometry>& geometry,
          const std::vector<TensorPlacements>& placements, const DeviceMesh& mesh) {
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor local = results[i].toTensor();
    if (!local.defined()) continue;
    const DTensorSpec spec(mesh, placements[i], geometry[i].shape, geometry[i].stride);
    results[i] = make_dtensor(in_order_of(local, geometry[i]), spec);
  }
}

}  // namespace

WaysKernel::WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op,
                       RunOnParts run_on_parts)
    : ways_(ways), run_on_parts_(run_on_parts), kinds_(op.schema()), memo_(kPlansPerOperator) {
  const auto written = OperatorTraits(op).written;
  if (!written.empty()) written_ = kinds_.operand_at(written[0]);
}

WaysKernel::Plan WaysKernel::make_plan(const OperatorCall& call,
                                       const std::vector<at::Tensor>& operands,
                                       const DeviceMesh& mesh) const {
  const CallGeometry geometry{.operands = geometry_of(operands), .plain = kinds_.plain_of(call)};
  const size_t results = call.handle().schema().returns().size();
  CallPlacements placements = placements_of(operands, mesh);
  placements.written = written_;
  Plan plan{.placements = propagate(ways_.ways, geometry, placements, results), .results = {}};
  const auto& targets = plan.placements.operands;
  if (written_.has_value() || std::all_of(targets.begin(), targets.end(), is_replicated_list))
    return plan;
  plan.results = ways_.results ? ways_.results(geometry) : meta_results(call, kinds_);
  return plan;
}

std::shared_ptr<const WaysKernel::Plan> WaysKernel::plan_of(const OperatorCall& call,
                                                            const std::vector<at::Tensor>& operands,
                                                            const DeviceMesh& mesh) const {
  MemoKey key = plan_key(mesh, operands, kinds_.plain_of(call));
  if (auto known = memo_.find(key)) return known;
  return memo_.remember(std::move(key), make_plan(call, operands, mesh));
}

std::vector<c10::IValue> WaysKernel::run_on_parts(OperatorCall& call,
                                                  const std::vector<at::Tensor>& operands,
                                                  const DeviceMesh& mesh, const Plan& plan) const {
  if (run_on_parts_ == nullptr) return call.run();
  std::vector<DTensorSpec> placed;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].defined()) {
      placed.push_back({mesh, plan.placements.operands[i], operands[i].sizes().vec(),
                        operands[i].strides().vec()});
    } else {
      placed.push_back({mesh, replicated_on(mesh), {}});
    }
  }
  return run_on_parts_(call, placed);
}

void WaysKernel::run(OperatorCall& call) const {
  const auto operands = kinds_.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto plan = plan_of(call, operands, mesh);
  if (written_.has_value())
    check_stays(call, operands[*written_], plan->placements.operands[*written_]);
  kinds_.replace_operands(call, place_operands(call, operands, plan->placements.operands,
                                               NotedRedistribution::Cause::kWay));
  auto results = run_on_parts(call, operands, mesh, *plan);
  if (written_.has_value()) {
    results = {operands[*written_]};
  } else if (plan->results.empty()) {
    wrap_replicated(results, mesh);
  } else {
    wrap(results, plan->results, plan->placements.results, mesh);
  }
  call.finish(std::move(results));
}

void run_replicated(OperatorCall& call) {
  const ArgumentKinds kinds(call.handle().schema());
  const auto operands = kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const std::vector<TensorPlacements> targets(operands.size(), replicated_on(mesh));
  kinds.replace_operands(
      call, place_operands(call, operands, targets, NotedRedistribution::Cause::kNoRule));
  auto results = call.run();
  wrap_replicated(results, mesh);
  call.finish(std::move(results));
}

}  // namespace fsdp::internal
