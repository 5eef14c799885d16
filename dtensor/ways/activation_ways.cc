// Activations with a second result: log_sigmoid, which keeps a buffer for its gradient,
// and the gradient of prelu, which is one of the slopes too.
#include "dtensor/ways/pointwise_ways.h"
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

// Elementwise, with two results that lie alike.
OperatorWays with_two_results(Linearity linearity) {
  return {.ways =
              [=](const CallGeometry& call) {
                auto ways = pointwise_ways(call, linearity);
                for (Way& way : ways) way.results.resize(2, way.results[0]);
                return ways;
              },
          .results =
              [](const CallGeometry& call) {
                return std::vector<ResultGeometry>(2, pointwise_result(call));
              }};
}

// log_sigmoid_backward(grad, self, buffer): on CPUs the buffer has the shape of self,
// elsewhere it is empty and not read.
CallGeometry without_empty_buffer(CallGeometry call) {
  Operand& buffer = call.operands[2];
  if (buffer.shape != call.operands[1].shape) buffer.shape = buffer.stride = {};
  return call;
}

std::vector<Way> log_sigmoid_backward_ways(const CallGeometry& call) {
  return pointwise_ways(without_empty_buffer(call), Linearity::kScale);
}

std::vector<ResultGeometry> log_sigmoid_backward_results(const CallGeometry& call) {
  return {pointwise_result(without_empty_buffer(call))};
}

}  // namespace

void add_activation_ways(WaysTable& table) {
  // On CPUs; elsewhere families/rules_log_sigmoid.cc.
  table["log_sigmoid_forward."] = with_two_results(Linearity::kNone);
  table["log_sigmoid_backward."] = {.ways = log_sigmoid_backward_ways,
                                    .results = log_sigmoid_backward_results};
  table["_prelu_kernel."] = pointwise(Linearity::kNone);
  table["_prelu_kernel_backward."] = with_two_results(Linearity::kScale);
}

}  // namespace fsdp::internal
