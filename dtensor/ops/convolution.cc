// Convolutions fit where the batch is cut; the gradients of weight and bias are then
// terms of sums over it.
#include "dtensor/ops/op_table.h"

#include <utility>

namespace fsdp::internal {
namespace {

// convolution(input, weight, bias, ...).
std::vector<PlacementStrategy> convolution_strategy(const OpSchema&) {
  const Placement whole = Replicate{};
  return {{{Shard{0}}, {Shard{0}, whole, whole}}};
}

// One of the dimensions that the kernel moves over.
struct Window {
  int64_t size, kernel, stride, padding, dilation, output_padding;

  int64_t result() const { return (size + 2 * padding - span()) / stride + 1; }
  int64_t transposed_result() const {
    return (size - 1) * stride - 2 * padding + span() + output_padding;
  }

 private:
  int64_t span() const { return dilation * (kernel - 1) + 1; }
};

// One number for all dimensions, or one for each.
int64_t nth(const std::vector<int64_t>& numbers, size_t n) {
  return numbers.size() == 1 ? numbers[0] : numbers[n];
}

// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
// groups).
std::vector<ResultGeometry> convolution_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  const Operand& weight = call.operands[1];
  const bool is_transposed = call.number(6) != 0;
  std::vector<int64_t> shape{input.size(0),
                             is_transposed ? weight.size(1) * call.number(8) : weight.size(0)};
  for (int64_t d = 2; d < input.ndim(); ++d) {
    const auto n = static_cast<size_t>(d - 2);
    const Window window{.size = input.size(d),
                        .kernel = weight.size(d),
                        .stride = nth(call.numbers(3), n),
                        .padding = nth(call.numbers(4), n),
                        .dilation = nth(call.numbers(5), n),
                        .output_padding = nth(call.numbers(7), n)};
    shape.push_back(is_transposed ? window.transposed_result() : window.result());
  }
  return {contiguous(std::move(shape))};
}

// convolution_backward(grad, input, weight, bias_sizes, ...) -> gradients of input,
// weight and bias.
std::vector<PlacementStrategy> convolution_backward_strategy(const OpSchema&) {
  const Placement terms = Partial{};
  return {{{Shard{0}, terms, terms}, {Shard{0}, Shard{0}, Replicate{}}}};
}

std::vector<ResultGeometry> convolution_backward_results(const OpSchema& call) {
  return {contiguous(call.operands[1].shape), contiguous(call.operands[2].shape),
          contiguous({call.operands[0].size(1)})};
}

}  // namespace

void add_convolution(OpTable& table) {
  table.add("convolution.",
            {.strategy = {.strategies = convolution_strategy, .results = convolution_results}});
  table.add("convolution_backward.", {.strategy = {.strategies = convolution_backward_strategy,
                                                   .results = convolution_backward_results}});
}

}  // namespace fsdp::internal
