#include "tests/fully_shard/random_programs/program_losses.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

namespace fsdp::testing {

using at::Tensor;

Tensor make_input(const Program& program, const RandomModel& model, uint64_t seed, int64_t rank) {
  auto generator = at::detail::createCPUGenerator(10 * seed + static_cast<uint64_t>(rank));
  auto input = at::randn({2, program.width}, generator, scalar_type(program.activations));
  if (!model.device.is_cpu())
    input = input.pin_memory().to(model.device, input.scalar_type(), /*non_blocking=*/true);
  return input.set_requires_grad(true);
}

Losses forward_losses(const Program& program, const RandomModel& model, const Action& action,
                      int64_t rank) {
  const Forward forward{.rank = rank, .condition = action.condition};
  Losses result;
  const auto run = [&](uint64_t seed) {
    result.inputs.push_back(make_input(program, model, seed, rank));
    return model.forward(result.inputs.back(), forward);
  };
  const auto loss = [](const Tensor& output) { return output.pow(2).mean(); };
  switch (action.kind) {
    case ActionKind::kSeveralForwards: {
      const auto first = loss(run(action.data));
      result.losses = {first + loss(run(action.data + 1))};
      break;
    }
    case ActionKind::kSeveralBackwards: {
      const auto output = run(action.data);
      result.losses = {loss(output), output.sum()};
      result.retain_graph = true;
      break;
    }
    case ActionKind::kInterleaved: {
      const auto first = loss(run(action.data));
      result.losses = {loss(run(action.data + 1)), first};
      break;
    }
    case ActionKind::kEvaluateBeforeBackward: {
      result.losses = {loss(run(action.data))};
      at::NoGradGuard no_grad;
      result.evaluated = model.forward(make_input(program, model, action.data + 1, rank), forward);
      break;
    }
    default:
      result.losses = {loss(run(action.data))};
  }
  return result;
}

// In more precision than it has: in which order parts are added up shows nowhere.
Tensor metric_of(const RandomModel& model, const Tensor& output) {
  auto metric = output.to(at::kDouble).pow(2).mean();
  for (const auto& [id, tensor] : model.tensors)
    metric = metric + 0.01 * tensor.entry().to(at::kDouble).pow(2).sum();
  return metric.to(output.scalar_type());
}

bool throws_as_planned(const Program& program, const RandomModel& model, const Action& action,
                       int64_t rank) {
  Forward forward{.rank = rank, .condition = action.condition};
  (action.kind == ActionKind::kThrowInForward ? forward.throw_at : forward.throw_backward_at) =
      action.target;
  try {
    const auto output = model.forward(make_input(program, model, action.data, rank), forward);
    if (action.kind == ActionKind::kThrowInBackward) output.sum().backward();
  } catch (const PlannedException&) {
    return true;
  }
  return false;
}

}  // namespace fsdp::testing
