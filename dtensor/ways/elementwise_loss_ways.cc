// Losses of elements: mse, smooth L1, Huber, soft margin, binary cross entropy. Single
// losses stay where their elements are; sums are added up, and so are averages once each
// part's counts as much as the part has elements (families/parts_elementwise_loss.cc).
#include "dtensor/ways/pointwise_ways.h"
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

constexpr int64_t kUnreduced = 0;  // at::Reduction::None

// Whether operand `i` is smaller than all of them together.
bool is_repeated(const CallGeometry& call, size_t i) {
  return call.operands[i].shape != pointwise_result(call).shape;
}

// loss(self, target, ...), the reduction in argument `reduction`.
std::vector<Way> elementwise_loss_ways(const CallGeometry& call, size_t reduction) {
  auto ways = pointwise_ways(call, Linearity::kNone);
  if (call.number(reduction) == kUnreduced) return ways;
  for (Way& way : ways) way.results = {Partial{}};
  return ways;
}

std::vector<ResultGeometry> elementwise_loss_results(const CallGeometry& call, size_t reduction) {
  if (call.number(reduction) != kUnreduced) return {contiguous({})};
  return {pointwise_result(call)};
}

OperatorWays elementwise_loss(size_t reduction) {
  return {.ways = [=](const CallGeometry& call) { return elementwise_loss_ways(call, reduction); },
          .results =
              [=](const CallGeometry& call) { return elementwise_loss_results(call, reduction); }};
}

// Cross entropies write into what has the shape of self or target: neither is repeated.
OperatorWays cross_entropy(size_t reduction) {
  OperatorWays ways = elementwise_loss(reduction);
  ways.ways = [=](const CallGeometry& call) {
    if (is_repeated(call, 0) || is_repeated(call, 1)) return std::vector<Way>{};
    return elementwise_loss_ways(call, reduction);
  };
  return ways;
}

// loss_backward(grad, self, target, ...), linear in grad, has the shape of self.
std::vector<Way> elementwise_loss_backward_ways(const CallGeometry& call) {
  if (is_repeated(call, 1)) return {};
  return pointwise_ways(call, Linearity::kScale);
}

std::vector<ResultGeometry> elementwise_loss_backward_results(const CallGeometry& call) {
  return {laid_as(call.operands[1].shape, call.operands[1].stride)};
}

}  // namespace

void add_elementwise_loss_ways(WaysTable& table) {
  for (const char* name : {"mse_loss.", "smooth_l1_loss.", "huber_loss.", "soft_margin_loss."})
    table[name] = elementwise_loss(2);
  table["binary_cross_entropy."] = cross_entropy(3);
  table["binary_cross_entropy_with_logits."] = cross_entropy(4);
  for (const char* name : {"mse_loss_backward.", "smooth_l1_loss_backward.", "huber_loss_backward.",
                           "soft_margin_loss_backward.", "binary_cross_entropy_backward."})
    table[name] = {.ways = elementwise_loss_backward_ways,
                   .results = elementwise_loss_backward_results};
}

}  // namespace fsdp::internal
