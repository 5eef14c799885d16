// gather and scatter. All operands lie as one of them, gathered along the dimension they
// work along and where they are not equally long; what is written in place must lie so.
// Plain indices and sources stand for the whole. The gradients of max(dim),
// sort, topk and their like are scatters.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/differentiable.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/whole_dims.h"

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// gather(self, dim, index), scatter(self, dim, index, src).
constexpr size_t kSelf = 0, kDim = 1, kIndex = 2, kSource = 3;

// Along which dimensions every rank needs the operands whole: the one they work along,
// and those in which another operand is not as long as self.
std::vector<int64_t> whole_dims(const OperatorCall& call) {
  const at::Tensor& self = call.argument(kSelf).toTensor();
  const int64_t along = c10::maybe_wrap_dim(call.argument(kDim).toInt(), self.dim());
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < self.dim(); ++d) {
    const auto differs = [&](size_t operand) {
      const auto& argument = call.argument(operand);
      return argument.isTensor() && (argument.toTensor().dim() != self.dim() ||
                                     argument.toTensor().size(d) != self.size(d));
    };
    const bool has_source = call.argument_count() > kSource;
    if (d == along || differs(kIndex) || (has_source && differs(kSource))) dims.push_back(d);
  }
  return dims;
}

// How the operands lie: as self where that is a DTensor, else as the indices, else as the
// source. Partial terms are added up. A self that is written can not move.
DTensorSpec common_spec(const OperatorCall& call) {
  const at::Tensor& self = call.argument(kSelf).toTensor();
  const at::Tensor& index = call.argument(kIndex).toTensor();
  DTensorSpec spec = spec_of(is_dtensor(self)    ? self
                             : is_dtensor(index) ? index
                                                 : call.argument(kSource).toTensor());
  spec = spec.with_shape(self.sizes().vec());
  const auto dims = whole_dims(call);
  if (!call.traits().written.empty() && is_dtensor(self)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!spec.has_partial(), call.description(),
                                ": a Partial tensor cannot be written at indices. Call "
                                ".redistribute({Replicate()}) first (collective).");
    check_whole_dims(call, spec, dims);
    return spec;
  }
  return spec.with_placements(without_partials(placements_whole_along(spec, dims)));
}

void check_mesh(const OperatorCall& call, const at::Tensor& operand, const DTensorSpec& spec) {
  TORCH_CHECK_VALUE(
      !is_dtensor(operand) || spec_of(operand).mesh() == spec.mesh(), call.description(),
      " has operands on different meshes; bring them to one mesh with .full_tensor() and "
      "fsdp::distribute_tensor (rank ",
      spec.mesh().rank(), ")");
}

// This rank's part of an operand, placed as `spec`. Collective where it must move, which
// is noted.
at::Tensor local_operand(const OperatorCall& call, size_t argument, const DTensorSpec& spec) {
  const at::Tensor operand = call.argument(argument).toTensor();
  check_mesh(call, operand, spec);
  if (!is_dtensor(operand))
    return local_part(
        operand, {spec.mesh(), spec.placements(), operand.sizes().vec(), operand.strides().vec()});
  const DTensorSpec& from = spec_of(operand);
  const size_t number = argument == kSelf ? 0 : argument - 1;  // `dim` is no tensor
  if (must_move(from, spec.placements()))
    note_redistribution(call, number, from, spec.placements(), NotedRedistribution::Cause::kNoRule);
  return redistribute_local(local_of(operand), from, spec.placements());
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
  const DTensorSpec spec = common_spec(call);
  const auto shape = call.argument(kIndex).toTensor().sizes().vec();
  for (const auto operand : {kSelf, kIndex}) {
    call.argument(operand) = local_operand(call, operand, spec);
  }
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), spec.with_shape(shape)));
}

void place_operands(OperatorCall& call, const DTensorSpec& spec) {
  for (const auto operand : {kSelf, kIndex, kSource}) {
    if (call.argument(operand).isTensor())
      call.argument(operand) = local_operand(call, operand, spec);
  }
}

void scatter_rule(OperatorCall& call) {
  check_self(call);
  const DTensorSpec spec = common_spec(call);
  place_operands(call, spec);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), spec));
}

// Plain zeros become a DTensor, in place.
void scatter_in_place_rule(OperatorCall& call) {
  check_self(call);
  const at::Tensor self = call.argument(kSelf).toTensor();
  const DTensorSpec spec = common_spec(call);
  place_operands(call, spec);
  auto results = call.run();
  if (!is_dtensor(self)) {
    const auto becomes = make_dtensor(results[0].toTensor().contiguous(), spec);
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
