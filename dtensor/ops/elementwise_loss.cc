// Single losses stay where their elements are; sums are added up, and so are averages: a
// part divides by its own size, so its average counts in proportion to that. Sums would
// do too, but overflow in half precision.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/pointwise_strategy.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

namespace fsdp::internal {
namespace {

// Whether operand `i` is smaller than all of them together.
bool is_repeated(const OpSchema& call, size_t i) {
  return call.operands[i].shape != pointwise_result(call).shape;
}

// loss(self, target, ...), the reduction in argument `reduction`.
std::vector<PlacementStrategy> elementwise_loss_strategy(const OpSchema& call, size_t reduction) {
  auto strategies = pointwise_strategy(call, Linearity::kNone);
  if (call.number(reduction) == at::Reduction::None) return strategies;
  for (PlacementStrategy& strategy : strategies) strategy.results = {Partial{}};
  return strategies;
}

std::vector<ResultGeometry> elementwise_loss_results(const OpSchema& call, size_t reduction) {
  if (call.number(reduction) != at::Reduction::None) return {contiguous({})};
  return {pointwise_result(call)};
}

// loss_backward(grad, self, target, ...), linear in grad, has the shape of self.
std::vector<PlacementStrategy> elementwise_loss_backward_strategy(const OpSchema& call) {
  if (is_repeated(call, 1)) return {};
  return pointwise_strategy(call, Linearity::kScale);
}

std::vector<ResultGeometry> elementwise_loss_backward_results(const OpSchema& call) {
  return {laid_as(call.operands[1].shape, call.operands[1].stride)};
}

// An average over `whole` elements, of which this rank has `own`.
struct AveragePart {
  int64_t own, whole;

  bool is_all() const { return own == whole; }
  bool is_empty() const { return own == 0; }
  double share() const { return static_cast<double>(own) / static_cast<double>(whole); }
};

bool is_average(const c10::IValue& reduction) { return reduction.toInt() == at::Reduction::Mean; }

// The average of nothing is not a number, its sum is 0.
void become_sum(c10::IValue& reduction) { reduction = static_cast<int64_t>(at::Reduction::Sum); }

int64_t broadcast_numel(at::IntArrayRef a, at::IntArrayRef b) {
  return c10::multiply_integers(at::infer_size(a, b));
}

// loss(self, target, ...), the reduction in argument `reduction`.
std::vector<c10::IValue> loss_of_part(OperatorCall& call, const PlacedOnMesh& placed,
                                      size_t reduction) {
  if (!is_average(call.argument(reduction))) return call.run();
  const AveragePart part{
      .own =
          broadcast_numel(call.argument(0).toTensor().sizes(), call.argument(1).toTensor().sizes()),
      .whole = broadcast_numel(placed.operand(0).shape(), placed.operand(1).shape())};
  if (part.is_empty() && !part.is_all()) become_sum(call.argument(reduction));
  auto results = call.run();
  if (!part.is_all()) results[0] = results[0].toTensor().mul(part.share());
  return results;
}

// loss_backward(grad, self, target, ...), which divides by the size of self.
std::vector<c10::IValue> loss_backward_of_part(OperatorCall& call, const PlacedOnMesh& placed,
                                               size_t reduction) {
  if (!is_average(call.argument(reduction))) return call.run();
  const AveragePart part{.own = call.argument(1).toTensor().numel(),
                         .whole = c10::multiply_integers(placed.operand(1).shape())};
  if (!part.is_all()) call.argument(0) = call.argument(0).toTensor().mul(part.share());
  return call.run();
}

OpEntry elementwise_loss(size_t reduction) {
  return {.strategy = {
              .strategies =
                  [=](const OpSchema& call) { return elementwise_loss_strategy(call, reduction); },
              .results =
                  [=](const OpSchema& call) { return elementwise_loss_results(call, reduction); }},
          .local_kernel = [=](OperatorCall& call, const PlacedOnMesh& placed) {
            return loss_of_part(call, placed, reduction);
          }};
}

// Cross entropies write into what has the shape of self or target: neither is repeated.
OpEntry cross_entropy(size_t reduction) {
  OpEntry entry = elementwise_loss(reduction);
  entry.strategy.strategies = [=](const OpSchema& call) {
    if (is_repeated(call, 0) || is_repeated(call, 1)) return std::vector<PlacementStrategy>{};
    return elementwise_loss_strategy(call, reduction);
  };
  return entry;
}

OpEntry elementwise_loss_backward(size_t reduction) {
  return {.strategy = {.strategies = elementwise_loss_backward_strategy,
                       .results = elementwise_loss_backward_results},
          .local_kernel = [=](OperatorCall& call, const PlacedOnMesh& placed) {
            return loss_backward_of_part(call, placed, reduction);
          }};
}

}  // namespace

void add_elementwise_loss(OpTable& table) {
  for (const char* name : {"mse_loss.", "smooth_l1_loss.", "huber_loss.", "soft_margin_loss."})
    table.add(name, elementwise_loss(2));
  table.add("binary_cross_entropy.", cross_entropy(3));
  table.add("binary_cross_entropy_with_logits.", cross_entropy(4));
  for (const char* name : {"mse_loss_backward.", "smooth_l1_loss_backward.", "huber_loss_backward.",
                           "soft_margin_loss_backward."})
    table.add(name, elementwise_loss_backward(3));
  table.add("binary_cross_entropy_backward.", elementwise_loss_backward(4));
}

}  // namespace fsdp::internal
