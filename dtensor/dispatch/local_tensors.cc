#include "dtensor/dispatch/local_tensors.h"

#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

void check_meshes(const OperatorCall& call, at::TensorList operands, const DeviceMesh& mesh) {
  for (const at::Tensor& operand : operands) {
    TORCH_CHECK_VALUE(!is_dtensor(operand) || spec_of(operand).mesh() == mesh, call.description(),
                      " has operands on different meshes; bring them to one mesh with "
                      ".full_tensor() and fsdp::distribute_tensor. Gradients on several meshes are "
                      "clipped by fsdp::clip_grad_norm_, not LibTorch's (rank ",
                      mesh.rank(), ")");
  }
}

// A number that a caller wrote stays one: it does not decide dtypes.
at::Tensor placed_plain(const at::Tensor& plain, const DeviceMesh& mesh,
                        const TensorPlacements& to) {
  const DTensorSpec from{mesh, replicated_on(mesh), plain.sizes().vec(), plain.strides().vec()};
  at::Tensor placed = redistribute_local(plain, from, to);
  if (plain.unsafeGetTensorImpl()->is_wrapped_number())
    placed.unsafeGetTensorImpl()->set_wrapped_number(true);
  return placed;
}

bool lies_as(const at::Tensor& local, const std::vector<int64_t>& stride) {
  for (int64_t d = 0; d < local.dim(); ++d) {
    if (local.size(d) != 1 && local.stride(d) != stride[static_cast<size_t>(d)]) return false;
  }
  return true;
}

bool is_contiguous(const TensorLayout& layout) {
  int64_t stride = 1;
  for (size_t d = layout.shape().size(); d-- > 0;
       stride *= std::max<int64_t>(layout.shape()[d], 1)) {
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

bool is_left_out(const at::Tensor& local, const DTensorSpec& spec) {
  return local.dim() == 1 && local.numel() == 0 &&
         local.sizes() != at::IntArrayRef(spec.local_shape());
}

bool is_recorded(const at::Tensor& operand) {
  return operand.defined() && at::GradMode::is_enabled() && operand.requires_grad();
}

bool is_replicated(const DTensorSpec& spec) {
  return std::all_of(spec.placements().begin(), spec.placements().end(),
                     [](const auto& placement) { return placement.is_replicate(); });
}

}  // namespace

DeviceMesh common_mesh(const OperatorCall& call, at::TensorList operands) {
  const auto first = std::find_if(operands.begin(), operands.end(), is_dtensor);
  TORCH_INTERNAL_ASSERT(first != operands.end(), call.name(), " without a DTensor");
  DeviceMesh mesh = spec_of(*first).mesh();
  check_meshes(call, operands, mesh);
  compare_plain(call.handle().schema().name(), operands, mesh);
  for (const at::Tensor& operand : operands)
    if (is_recorded(operand) && !is_dtensor(operand)) bring_gradient_whole(operand);
  return mesh;
}

TensorPlacements replicated_on(const DeviceMesh& mesh) {
  return TensorPlacements(static_cast<size_t>(mesh.ndim()), Replicate{});
}

CallPlacements placements_of(at::TensorList operands, const DeviceMesh& mesh) {
  CallPlacements placements{.mesh_shape = mesh.shape(), .operands = {}};
  for (const at::Tensor& operand : operands) {
    placements.operands.push_back(is_dtensor(operand) ? spec_of(operand).placements()
                                                      : replicated_on(mesh));
  }
  return placements;
}

std::vector<Operand> geometry_of(at::TensorList operands) {
  std::vector<Operand> geometry;
  for (const at::Tensor& operand : operands) {
    geometry.emplace_back();
    if (!operand.defined()) continue;
    geometry.back() = {.shape = operand.sizes().vec(),
                       .stride = operand.strides().vec(),
                       .dtype = dtype_of(operand.scalar_type())};
  }
  return geometry;
}

Operands place_operands(at::TensorList operands, const std::vector<TensorPlacements>& targets) {
  const auto dtensor = std::find_if(operands.begin(), operands.end(), is_dtensor);
  const DeviceMesh mesh = spec_of(*dtensor).mesh();
  Operands locals(operands.begin(), operands.end());
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].defined()) continue;
    locals[i] = is_dtensor(operands[i]) ? moved_part(operands[i], targets[i])
                                        : placed_plain(operands[i], mesh, targets[i]);
  }
  return locals;
}

at::Tensor replicated_result(const at::Tensor& local, const DeviceMesh& mesh) {
  return make_dtensor(
      local, DTensorSpec(mesh, replicated_on(mesh), local.sizes().vec(), local.strides().vec()));
}

at::Tensor result_over(const at::Tensor& local, const DTensorSpec& spec) {
  if (is_left_out(local, spec)) return replicated_result(local, spec.mesh());
  if (is_replicated(spec) && !lies_as(local, spec.stride()))
    return replicated_result(local, spec.mesh());
  return make_dtensor(in_order_of(local, spec.layout()), spec);
}

}  // namespace fsdp::internal
