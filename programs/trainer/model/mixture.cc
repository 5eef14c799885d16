#include "programs/trainer/model/mixture.h"

#include "experts/route_to_experts.h"

#include <ATen/OpMathType.h>
#include <torch/utils.h>

namespace programs {

ExpertsImpl::ExpertsImpl(int64_t count, int64_t width, int64_t hidden)
    : gate(register_parameter("gate", torch::empty({count, hidden, width}))),
      up(register_parameter("up", torch::empty({count, hidden, width}))),
      down(register_parameter("down", torch::empty({count, width, hidden}))) {}

torch::Tensor ExpertsImpl::forward(const torch::Tensor& rows, const torch::Tensor& counts) {
  const auto hidden = torch::silu(fsdp::grouped_linear(rows, counts, gate)) *
                      fsdp::grouped_linear(rows, counts, up);
  return fsdp::grouped_linear(hidden, counts, down);
}

MixtureImpl::MixtureImpl(const MixtureConfig& config, int64_t width)
    : router(register_module(
          "router",
          torch::nn::Linear(torch::nn::LinearOptions(width, config.experts).bias(false)))),
      experts(register_module("experts", Experts(config.experts, width, config.hidden))),
      config_(config) {}

torch::Tensor MixtureImpl::forward(const torch::Tensor& x) {
  const auto tokens = x.reshape({-1, x.size(-1)});
  auto [weights, chosen] =
      router(tokens).softmax(-1, at::toOpMathType(x.scalar_type())).topk(config_.per_token, -1);
  if (config_.sums_to_one) weights = weights / weights.sum(-1, /*keepdim=*/true);
  const fsdp::ExpertRouting routing{
      .experts = chosen, .weights = weights.to(x.scalar_type()), .count = config_.experts};
  const auto run = [this](const torch::Tensor& rows, const torch::Tensor& counts) {
    return experts(rows, counts);
  };
  const auto y = mesh ? fsdp::route_to_experts(tokens, routing, *mesh, run)
                      : fsdp::route_to_experts(tokens, routing, run);
  return y.reshape(x.sizes());
}

}  // namespace programs
