// log_sigmoid keeps a buffer for its gradient: on CPUs it is as large as the result, on
// other devices it is empty. The gradient of prelu is one of the slopes too. glu halves a
// dimension: where one that is cut has both halves cut alike, as the columns of a packed
// up-projection are, each rank has parts that belong together.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/strategy/whole_dim_strategy.h"

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// Elementwise, with two results that lie alike.
OpStrategy with_two_results(Linearity linearity) {
  return {.strategies =
              [=](const OpSchema& call) {
                auto strategies = pointwise_strategy(call, linearity);
                for (PlacementStrategy& strategy : strategies)
                  strategy.results.resize(2, strategy.results[0]);
                return strategies;
              },
          .results =
              [](const OpSchema& call) {
                return std::vector<ResultGeometry>(2, pointwise_result(call));
              }};
}

// As it is on devices other than CPUs.
OpStrategy with_empty_buffer(const OpStrategy& with_buffer) {
  return {.strategies =
              [of = with_buffer.strategies](const OpSchema& call) {
                auto strategies = of(call);
                for (PlacementStrategy& strategy : strategies) strategy.results[1] = Replicate{};
                return strategies;
              },
          .results =
              [of = with_buffer.results](const OpSchema& call) {
                return std::vector<ResultGeometry>{of(call)[0], contiguous({0})};
              }};
}

// log_sigmoid_forward(self) -> result, buffer.
void run_log_sigmoid(OperatorCall& call, const StrategyKernel* by_strategy) {
  static const StrategyKernel elsewhere(with_empty_buffer(with_two_results(Linearity::kNone)),
                                        call.handle());
  (call.argument(0).toTensor().is_cpu() ? *by_strategy : elsewhere).run(call);
}

// log_sigmoid_backward(grad, self, buffer) does not read an empty buffer.
OpSchema without_empty_buffer(OpSchema call) {
  Operand& buffer = call.operands[2];
  if (buffer.shape != call.operands[1].shape) buffer.shape = buffer.stride = {};
  return call;
}

std::vector<PlacementStrategy> log_sigmoid_backward_strategy(const OpSchema& call) {
  return pointwise_strategy(without_empty_buffer(call), Linearity::kScale);
}

std::vector<ResultGeometry> log_sigmoid_backward_results(const OpSchema& call) {
  return {pointwise_result(without_empty_buffer(call))};
}

// The dimension that glu(self, dim) halves; `self` and `dim` say which operand and
// argument.
int64_t halved_dim(const OpSchema& call, size_t self, size_t dim) {
  return wrapped_dim(call.number(dim), call.operands[self].ndim());
}

// How each half is cut where the whole is cut so; none where they are not cut alike.
std::optional<Placement> cut_of_halves(const Placement& whole, int64_t dim) {
  if (!whole.is_shard(dim) || whole.shard().outer % 2 != 0) return std::nullopt;
  const Shard& cut = whole.shard();
  return Shard{dim, cut.outer / 2, cut.unit};
}

std::vector<PlacementStrategy> glu_strategy(const OpSchema& call) {
  const int64_t dim = halved_dim(call, 0, 1);
  auto strategies = along_strategy(call, {.dims = {dim}}, 1);
  if (const auto halves = cut_of_halves(call.arriving[0], dim))
    strategies.push_back({{*halves}, {call.arriving[0]}});
  return strategies;
}

std::vector<ResultGeometry> glu_results(const OpSchema& call) {
  auto shape = call.operands[0].shape;
  if (!shape.empty()) shape[static_cast<size_t>(halved_dim(call, 0, 1))] /= 2;
  return {contiguous(std::move(shape))};
}

// glu_backward(grad, self, dim)
std::vector<PlacementStrategy> glu_backward_strategy(const OpSchema& call) {
  const int64_t dim = halved_dim(call, 1, 2);
  auto strategies = along_strategy(call, {.dims = {dim}}, 1);
  if (const auto halves = cut_of_halves(call.arriving[1], dim))
    strategies.push_back({{call.arriving[1]}, {*halves, call.arriving[1]}});
  return strategies;
}

std::vector<ResultGeometry> glu_backward_results(const OpSchema& call) {
  return {contiguous(call.operands[1].shape)};
}

}  // namespace

void add_activations(OpTable& table) {
  table.add("log_sigmoid_forward.",
            {.strategy = with_two_results(Linearity::kNone), .handler = run_log_sigmoid});
  table.add("log_sigmoid_backward.", {.strategy = {.strategies = log_sigmoid_backward_strategy,
                                                   .results = log_sigmoid_backward_results}});
  table.add("_prelu_kernel.", {.strategy = pointwise(Linearity::kNone)});
  table.add("_prelu_kernel_backward.", {.strategy = with_two_results(Linearity::kScale)});
  table.add("glu.", {.strategy = {.strategies = glu_strategy, .results = glu_results}});
  table.add("glu_backward.",
            {.strategy = {.strategies = glu_backward_strategy, .results = glu_backward_results}});
}

}  // namespace fsdp::internal
