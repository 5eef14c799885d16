#include "dtensor/internal/run_by_ways.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/meta_results.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/plan_key.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kPlansPerOperator = 1024;

TensorPlacements everywhere(const DeviceMesh& mesh) {
  return TensorPlacements(static_cast<size_t>(mesh.ndim()), Replicate{});
}

bool is_replicated_list(const TensorPlacements& placements) {
  return std::all_of(placements.begin(), placements.end(),
                     [](const auto& placement) { return placement.is_replicate(); });
}

void check_meshes(const OperatorCall& call, const std::vector<at::Tensor>& operands,
                  const DeviceMesh& mesh) {
  for (const at::Tensor& operand : operands) {
    TORCH_CHECK_VALUE(!is_dtensor(operand) || spec_of(operand)->mesh == mesh, call.description(),
                      " has operands on different meshes; bring them to one mesh with "
                      ".full_tensor() and fsdp::distribute_tensor (rank ",
                      mesh.rank(), ")");
  }
}

// What is plain beside a registry entry is one rank's own, not the same on all.
void check_entries(const OperatorCall& call, const std::vector<at::Tensor>& operands,
                   const DeviceMesh& mesh) {
  const bool has_entry = std::any_of(operands.begin(), operands.end(), [](const auto& operand) {
    return is_dtensor(operand) && owner_of(operand) != nullptr;
  });
  const bool has_plain = std::any_of(operands.begin(), operands.end(), [](const auto& operand) {
    return operand.defined() && !is_dtensor(operand) && operand.numel() != 1;
  });
  TORCH_CHECK_VALUE(!has_entry || !has_plain, call.description(),
                    " mixes a sharded parameter with a plain tensor. Plain tensors compute with "
                    "the whole value, fsdp::DTensor(t).full_tensor() (collective; rank ",
                    mesh.rank(), ")");
}

DeviceMesh common_mesh(const OperatorCall& call, const std::vector<at::Tensor>& operands) {
  const auto first = std::find_if(operands.begin(), operands.end(), is_dtensor);
  TORCH_INTERNAL_ASSERT(first != operands.end(), call.name(), " without a DTensor");
  DeviceMesh mesh = spec_of(*first)->mesh;
  check_meshes(call, operands, mesh);
  check_entries(call, operands, mesh);
  return mesh;
}

CallPlacements placements_of(const std::vector<at::Tensor>& operands, const DeviceMesh& mesh) {
  CallPlacements placements{.mesh_shape = mesh.shape(), .operands = {}};
  for (const at::Tensor& operand : operands) {
    placements.operands.push_back(is_dtensor(operand) ? spec_of(operand)->placements
                                                      : everywhere(mesh));
  }
  return placements;
}

std::vector<Operand> geometry_of(const std::vector<at::Tensor>& operands) {
  std::vector<Operand> geometry;
  for (const at::Tensor& operand : operands) {
    geometry.emplace_back();
    if (!operand.defined()) continue;
    geometry.back() = {.shape = operand.sizes().vec(),
                       .stride = operand.strides().vec(),
                       .element_size = operand.element_size()};
  }
  return geometry;
}

// The operands of one call on their way. Collective where one must move.
struct Move {
  const OperatorCall& call;
  const DeviceMesh& mesh;
  NotedRedistribution::Cause cause;

  std::vector<at::Tensor> locals(const std::vector<at::Tensor>& operands,
                                 const std::vector<TensorPlacements>& to) const {
    std::vector<at::Tensor> locals;
    locals.reserve(operands.size());
    for (size_t i = 0; i < operands.size(); ++i) locals.push_back(local(i, operands[i], to[i]));
    return locals;
  }

 private:
  at::Tensor local(size_t operand, const at::Tensor& tensor, const TensorPlacements& to) const {
    if (!tensor.defined()) return tensor;
    if (!is_dtensor(tensor)) {
      return redistribute_local(
          tensor, {mesh, everywhere(mesh), tensor.sizes().vec(), tensor.strides().vec()}, to);
    }
    const DTensorSpec& from = *spec_of(tensor);
    if (moves(from, to)) note_redistribution(call, operand, from, to, cause);
    return redistribute_local(local_of(tensor), from, to);
  }

  bool moves(const DTensorSpec& from, const TensorPlacements& to) const {
    for (size_t m = 0; m < to.size(); ++m) {
      const bool stays = from.placements[m] == to[m] || from.placements[m].is_replicate();
      if (!stays && mesh.size(static_cast<int64_t>(m)) > 1) return true;
    }
    return false;
  }
};

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
      local, intern_spec({mesh, everywhere(mesh), local.sizes().vec(), local.strides().vec()}));
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
    auto spec = intern_spec({mesh, placements[i], geometry[i].shape, geometry[i].stride});
    results[i] = make_dtensor(in_order_of(local, geometry[i]), std::move(spec));
  }
}

}  // namespace

WaysKernel::WaysKernel(const OperatorWays& ways, const c10::OperatorHandle& op)
    : ways_(ways), kinds_(op.schema()), memo_(kPlansPerOperator) {}

WaysKernel::Plan WaysKernel::make_plan(const OperatorCall& call,
                                       const std::vector<at::Tensor>& operands,
                                       const DeviceMesh& mesh) const {
  const CallGeometry geometry{.operands = geometry_of(operands), .plain = kinds_.plain_of(call)};
  const size_t results = call.handle().schema().returns().size();
  Plan plan{.placements = propagate(ways_.ways, geometry, placements_of(operands, mesh), results),
            .results = {}};
  const auto& targets = plan.placements.operands;
  if (std::all_of(targets.begin(), targets.end(), is_replicated_list)) return plan;
  plan.results = ways_.results != nullptr ? ways_.results(geometry) : meta_results(call, kinds_);
  return plan;
}

std::shared_ptr<const WaysKernel::Plan> WaysKernel::plan_of(const OperatorCall& call,
                                                            const std::vector<at::Tensor>& operands,
                                                            const DeviceMesh& mesh) const {
  MemoKey key = plan_key(mesh, operands, kinds_.plain_of(call));
  if (auto known = memo_.find(key)) return known;
  return memo_.remember(std::move(key), make_plan(call, operands, mesh));
}

void WaysKernel::run(OperatorCall& call) const {
  const auto operands = kinds_.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto plan = plan_of(call, operands, mesh);
  const Move move{.call = call, .mesh = mesh, .cause = NotedRedistribution::Cause::kWay};
  kinds_.replace_operands(call, move.locals(operands, plan->placements.operands));
  auto results = call.run();
  if (plan->results.empty()) {
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
  const Move move{.call = call, .mesh = mesh, .cause = NotedRedistribution::Cause::kNoRule};
  const std::vector<TensorPlacements> targets(operands.size(), everywhere(mesh));
  kinds.replace_operands(call, move.locals(operands, targets));
  auto results = call.run();
  wrap_replicated(results, mesh);
  call.finish(std::move(results));
}

}  // namespace fsdp::internal
