// nll_loss and nll_loss2d. With the batch cut, sums are terms; with the classes cut too:
// each rank counts the targets whose class it has. The average is a sum of losses over a
// sum of weights, both of which are terms, so that uneven parts count as they should.
#include "dtensor/families/parts.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/cut_indices.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/ways/table.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

namespace fsdp::internal {
namespace {

constexpr int64_t kIgnored = -100;  // no class of any part

bool has_batch(const Operand& self) { return self.ndim() >= 2; }

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight.
std::vector<Way> cut_classes_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[0]) || call.number(3) == at::Reduction::Mean) return {};
  const Placement whole = Replicate{};
  return {{.results = {Partial{}, whole}, .operands = {Shard{1}, whole, whole}}};
}

// nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total_weight).
std::vector<Way> cut_classes_backward_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[1])) return {};
  const Placement whole = Replicate{};
  return {{.results = {Shard{1}}, .operands = {whole, Shard{1}, whole, whole, whole}}};
}

// How a row of `self`, a number per class, lies.
DTensorSpec classes_of(const DTensorSpec& self) {
  auto placements = self.placements();
  for (Placement& placement : placements)
    placement = placement.is_shard(1) ? placement.along(0) : Placement(Replicate{});
  return {self.mesh(), std::move(placements), {self.shape()[1]}};
}

bool has_cut_classes(const DTensorSpec& self) { return self.shape().size() >= 2 && self.is_cut(1); }

// The arguments target, weight, reduction and ignore_index; target is argument `first`.
struct Targets {
  OperatorCall& call;
  size_t first;

  at::Tensor classes() const { return call.argument(first).toTensor(); }
  at::Tensor weight() const {  // undefined for none
    const c10::IValue& weight = call.argument(first + 1);
    return weight.isTensor() ? weight.toTensor() : at::Tensor();
  }
  bool are_reduced() const { return call.argument(first + 2).toInt() != at::Reduction::None; }
  at::Tensor are_ignored() const { return classes().eq(call.argument(first + 3).toInt()); }

  // As the part of the classes that this rank has counts them: those whose class is
  // elsewhere are ignored like those that the caller ignores. The total weight, a scalar
  // of `options`, is still that of all.
  at::Tensor become_own(const DTensorSpec& self, const at::TensorOptions& options) const {
    const at::Tensor ignored = are_ignored(), counted = classes().masked_fill(ignored, 0);
    check_indices(counted, self.shape()[1], "nll_loss: target");
    const auto cut = cut_indices(counted, self, /*dim=*/1);
    at::Tensor total = at::zeros({}, options);
    if (are_reduced()) {
      const at::Tensor weights = weight().defined()
                                     ? weight().index_select(0, counted.flatten()).view_as(counted)
                                     : at::ones(counted.sizes(), options);
      total = weights.masked_fill(ignored, 0).sum();
    }
    call.argument(first) = cut.in_part.masked_fill(cut.is_elsewhere.logical_or(ignored), kIgnored);
    if (weight().defined()) call.argument(first + 1) = local_part(weight(), classes_of(self));
    call.argument(first + 3) = kIgnored;
    return total;
  }
};

std::vector<c10::IValue> count_own_targets(OperatorCall& call, const PlacedOnMesh& placed) {
  if (!has_cut_classes(placed.operand(0))) return call.run();
  const at::Tensor total =
      Targets{call, 1}.become_own(placed.operand(0), call.argument(0).toTensor().options());
  return {call.run()[0], total};
}

std::vector<c10::IValue> count_own_targets_backward(OperatorCall& call,
                                                    const PlacedOnMesh& placed) {
  if (has_cut_classes(placed.operand(1)))
    Targets{call, 2}.become_own(placed.operand(1), call.argument(1).toTensor().options());
  return call.run();
}

constexpr const char* kForwards[] = {"nll_loss_forward.", "nll_loss2d_forward."};

// An average is collective where the batch is cut.
template <size_t kind>
void nll_loss_rule(OperatorCall& call) {
  static const WaysKernel by_ways(
      with_more_ways(ways_table().at(kForwards[kind]), cut_classes_ways), call.handle(),
      count_own_targets);
  c10::IValue& reduction = call.argument(3);
  const bool is_average = reduction.toInt() == at::Reduction::Mean;
  if (is_average) reduction = static_cast<int64_t>(at::Reduction::Sum);
  by_ways.run(call);
  if (!is_average) return;
  const at::Tensor sum = call.result(0).toTensor();
  const at::Tensor total = reduce_partials(call.result(1).toTensor());
  call.finish(std::vector<c10::IValue>{sum.div(total), total});
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  table[kForwards[0]] = nll_loss_rule<0>;
  table[kForwards[1]] = nll_loss_rule<1>;
}

void add_loss_parts(PartsTable& table) {
  for (const char* name : {"nll_loss_backward.", "nll_loss2d_backward."}) {
    table[name] = {with_more_ways(ways_table().at(name), cut_classes_backward_ways),
                   count_own_targets_backward};
  }
}

}  // namespace fsdp::internal
