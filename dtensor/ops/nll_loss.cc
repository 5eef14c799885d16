// With the batch cut, or a dimension of the image of nll_loss2d, sums are added up, and
// single losses stay where they are. With the classes cut each rank counts the targets
// whose class it has. The average is a sum of losses over a sum of weights, both of which
// are terms, so that uneven parts count as they should.
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/redistribute.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kIgnored = -100;  // no class of any part

// Operand `self` is [batch, classes, ...], its targets [batch, ...]; one without a batch
// is [classes].
bool has_batch(const Operand& self) { return self.ndim() >= 2; }

// The dimension of self that is dimension `dim` of the targets.
int64_t dim_of_self(int64_t dim) { return dim == 0 ? 0 : dim + 1; }

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight,
// which is 0 where nothing is reduced.
std::vector<PlacementStrategy> nll_loss_strategy(const OpSchema& call) {
  if (!has_batch(call.operands[0]) || call.number(3) == at::Reduction::Mean) return {};
  const Placement whole = Replicate{};
  const bool is_reduced = call.number(3) == at::Reduction::Sum;
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[1].ndim(); ++d) {
    const Placement loss = is_reduced ? Placement(Partial{}) : Shard{d};
    strategies.push_back({{loss, is_reduced ? Placement(Partial{}) : whole},
                          {Shard{dim_of_self(d)}, Shard{d}, whole}});
  }
  strategies.push_back({{Partial{}, whole}, {Shard{1}, whole, whole}});  // of own classes
  return strategies;
}

std::vector<ResultGeometry> nll_loss_results(const OpSchema& call) {
  const bool is_reduced = call.number(3) != at::Reduction::None;
  return {contiguous(is_reduced ? std::vector<int64_t>{} : call.operands[1].shape), contiguous({})};
}

// nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total_weight).
std::vector<PlacementStrategy> nll_loss_backward_strategy(const OpSchema& call) {
  if (!has_batch(call.operands[1])) return {};
  const Placement whole = Replicate{};
  const bool is_reduced = call.number(4) != at::Reduction::None;
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[2].ndim(); ++d) {
    const Placement cut = Shard{dim_of_self(d)}, target = Shard{d};
    strategies.push_back({{cut}, {is_reduced ? whole : target, cut, target, whole, whole}});
  }
  strategies.push_back({{Shard{1}}, {whole, Shard{1}, whole, whole, whole}});  // of own classes
  return strategies;
}

std::vector<ResultGeometry> nll_loss_backward_results(const OpSchema& call) {
  return {laid_as(call.operands[1].shape, call.operands[1].stride)};
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

// nll_loss_forward. An average is collective where the batch is cut.
void nll_loss_forward(OperatorCall& call, const StrategyKernel* by_strategy) {
  c10::IValue& reduction = call.argument(3);
  const bool is_average = reduction.toInt() == at::Reduction::Mean;
  if (is_average) reduction = static_cast<int64_t>(at::Reduction::Sum);
  by_strategy->run(call);
  if (!is_average) return;
  const at::Tensor sum = call.result(0).toTensor();
  const at::Tensor total = reduce_partials(call.result(1).toTensor());
  call.finish(std::vector<c10::IValue>{sum.div(total), total});
}

}  // namespace

void add_nll_loss(OpTable& table) {
  for (const char* name : {"nll_loss_forward.", "nll_loss2d_forward."}) {
    table.add(name, {.strategy = {.strategies = nll_loss_strategy, .results = nll_loss_results},
                     .local_kernel = count_own_targets,
                     .handler = nll_loss_forward});
  }
  for (const char* name : {"nll_loss_backward.", "nll_loss2d_backward."}) {
    table.add(name, {.strategy = {.strategies = nll_loss_backward_strategy,
                                  .results = nll_loss_backward_results},
                     .local_kernel = count_own_targets_backward});
  }
}

}  // namespace fsdp::internal
