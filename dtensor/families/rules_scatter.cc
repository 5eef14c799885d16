// gather and scatter along a dimension that is whole on every rank. All operands lie as
// one of them; plain indices and sources stand for the whole. The gradients of max(dim),
// sort, topk and their like are scatters.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/differentiable.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/whole_dims.h"

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

// gather(self, dim, index), scatter(self, dim, index, src).
constexpr size_t kSelf = 0, kDim = 1, kIndex = 2, kSource = 3;

// How the operands lie: as self where that is a DTensor, else as the indices, else as the
// source. Partial terms are added up, except those of a self that is written: it can not
// move.
DTensorSpec common_spec(const OperatorCall& call) {
  const at::Tensor& self = call.argument(kSelf).toTensor();
  const at::Tensor& index = call.argument(kIndex).toTensor();
  DTensorSpec spec = *spec_of(is_dtensor(self)    ? self
                              : is_dtensor(index) ? index
                                                  : call.argument(kSource).toTensor());
  auto whole = without_partials(spec.placements);
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.traits().written.empty() || whole == spec.placements || !is_dtensor(self),
      call.description(),
      ": a Partial tensor cannot be written at indices. Call "
      ".redistribute({Replicate()}) first (collective).");
  spec.placements = std::move(whole);
  spec.shape = self.sizes().vec();
  spec.stride = contiguous_strides(spec.shape);
  check_whole_dims(call, spec, {c10::maybe_wrap_dim(call.argument(kDim).toInt(), self.dim())});
  return spec;
}

// Every rank's part of an operand must meet the same part of self.
void check_cut_alike(const OperatorCall& call, const at::Tensor& operand, const DTensorSpec& spec) {
  TORCH_CHECK_VALUE(
      !is_dtensor(operand) || spec_of(operand)->mesh == spec.mesh, call.description(),
      " has operands on different meshes; bring them to one mesh with .full_tensor() and "
      "fsdp::distribute_tensor (rank ",
      spec.mesh.rank(), ")");
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    if (!spec.placements[m].is_shard() || spec.mesh.size(static_cast<int64_t>(m)) == 1) continue;
    const auto dim = spec.placements[m].shard_dim();
    const bool alike = operand.dim() == static_cast<int64_t>(spec.shape.size()) &&
                       operand.size(dim) == spec.shape[static_cast<size_t>(dim)];
    TORCH_CHECK_NOT_IMPLEMENTED(alike, call.description(), ": along dimension ", dim,
                                ", which is cut across ranks, all operands must be as long. Call "
                                ".redistribute({Replicate()}) first (collective).");
  }
}

// This rank's part of an operand, placed as `spec`. Collective where it must move.
at::Tensor local_operand(const OperatorCall& call, const at::Tensor& operand,
                         const DTensorSpec& spec) {
  check_cut_alike(call, operand, spec);
  if (is_dtensor(operand))
    return redistribute_local(local_of(operand), *spec_of(operand), spec.placements);
  return local_part(operand,
                    {spec.mesh, spec.placements, operand.sizes().vec(), operand.strides().vec()});
}

// A plain self is one that autograd's formula made of zeros.
void check_self(const OperatorCall& call) {
  TORCH_CHECK_VALUE(is_dtensor(call.argument(kSelf).toTensor()) || inside_backward(),
                    call.description(),
                    ": a plain tensor with DTensors as indices or source; distribute it first: "
                    "fsdp::distribute_tensor(t, mesh, placements)");
}

void gather_rule(OperatorCall& call) {
  check_self(call);
  DTensorSpec spec = common_spec(call);
  const auto shape = call.argument(kIndex).toTensor().sizes().vec();
  for (const auto operand : {kSelf, kIndex}) {
    call.argument(operand) = local_operand(call, call.argument(operand).toTensor(), spec);
  }
  spec.shape = shape;
  spec.stride = contiguous_strides(shape);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), intern_spec(std::move(spec))));
}

void place_operands(OperatorCall& call, const DTensorSpec& spec) {
  for (const auto operand : {kSelf, kIndex, kSource}) {
    auto& argument = call.argument(operand);
    if (argument.isTensor()) argument = local_operand(call, argument.toTensor(), spec);
  }
}

void scatter_rule(OperatorCall& call) {
  check_self(call);
  const DTensorSpec spec = common_spec(call);
  place_operands(call, spec);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), intern_spec(spec)));
}

// Plain zeros become a DTensor, in place.
void scatter_in_place_rule(OperatorCall& call) {
  check_self(call);
  const at::Tensor self = call.argument(kSelf).toTensor();
  const DTensorSpec spec = common_spec(call);
  place_operands(call, spec);
  auto results = call.run();
  if (!is_dtensor(self)) {
    const auto becomes = make_dtensor(results[0].toTensor().contiguous(), intern_spec(spec));
    self.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
  }
  call.finish(self);
}

}  // namespace

void add_scatter_rules(RuleTable& table) {
  table["gather."] = gather_rule;
  for (const char* name : {"scatter.src", "scatter.value", "scatter_add."})
    table[name] = scatter_rule;
  for (const char* name : {"scatter_.src", "scatter_.value", "scatter_add_."})
    table[name] = scatter_in_place_rule;
}

}  // namespace fsdp::internal
