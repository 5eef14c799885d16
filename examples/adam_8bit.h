// Adam with both moments in eight bits, each block of 256 elements with a scale of its
// own (after Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise
// Quantization", 2022, with codes of equal steps). Blocks are of the whole tensor, so
// that no cut changes the numbers: written with fsdp::OwnedStep.
//
//   examples::Adam8bit adam(model->parameters(), {1e-3});
#pragma once

#include "optim/owned_step.h"

#include <torch/optim/adam.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <cmath>
#include <memory>
#include <vector>

namespace examples {

// Of the first moment and of the second one's root, on the rank that computes with the
// parameter: [blocks, 256] codes and [blocks, 1] scales, one after the other.
struct Adam8bitParamState : torch::optim::OptimizerCloneableParamState<Adam8bitParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(std::vector<torch::Tensor>, moments);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(moments);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::vector<torch::Tensor>, moments);
  }
};

class Adam8bit : public torch::optim::Optimizer {
 public:
  using Options = torch::optim::AdamOptions;  // of which it knows lr, betas and eps

  explicit Adam8bit(const std::vector<torch::Tensor>& params, Options options = {})
      : Optimizer(std::vector<torch::Tensor>(params), std::make_unique<Options>(options)),
        owned_(params, {.optimizer = "Adam8bit"}) {
    for (size_t i = 0; i < params.size(); ++i) state_of(i);
  }

  torch::Tensor step(LossClosure closure = nullptr) override {
    const auto loss = closure ? closure() : torch::Tensor();
    const torch::NoGradGuard no_grad;
    const double lr = param_groups_[0].options().get_lr();
    std::vector<size_t> positions;
    for (size_t i = 0; i < params().size(); ++i) {
      if (!params()[i].grad().defined()) continue;
      positions.push_back(i);
      state_of(i).step(state_of(i).step() + 1);
    }
    owned_.run(positions, {.input = [&](size_t i) { return params()[i].grad(); },
                           .compute = [&](size_t i, const auto& g) { return update_of(i, g); },
                           .apply = [&](size_t i, const auto& u) { params()[i].add_(u, -lr); }});
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<Adam8bitParamState, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<Adam8bitParamState, Options>(archive, *this);
  }

 private:
  static constexpr int64_t kBlock = 256, kMost = 127;  // elements, and the largest code

  std::vector<torch::Tensor>& params() { return param_groups_[0].params(); }

  Adam8bitParamState& state_of(size_t i) {
    auto& state = state_[params()[i].unsafeGetTensorImpl()];
    if (!state) {
      const int64_t blocks = (params()[i].numel() + kBlock - 1) / kBlock;
      auto fresh = std::make_unique<Adam8bitParamState>();
      for (int moment = 0; moment < 2; ++moment) {
        fresh->moments().push_back(owned_.zeros(i, {blocks, kBlock}, torch::kChar));
        fresh->moments().push_back(owned_.zeros(i, {blocks, 1}));
      }
      state = std::move(fresh);
    }
    return static_cast<Adam8bitParamState&>(*state);
  }

  torch::Tensor update_of(size_t i, const torch::Tensor& grad) {
    const auto& options = static_cast<const Options&>(param_groups_[0].options());
    const auto [beta1, beta2] = options.betas();
    const auto step = static_cast<double>(state_of(i).step());
    const auto g =
        torch::constant_pad_nd(grad.flatten(), {0, (kBlock - grad.numel() % kBlock) % kBlock})
            .view({-1, kBlock});
    const auto mean = moved(i, 0, [&](auto& m) { m.lerp_(g, 1 - beta1); });
    const auto root =
        moved(i, 2, [&](auto& r) { r.square_().lerp_(g.square(), 1 - beta2).sqrt_(); });
    const auto scale = root.div(std::sqrt(1 - std::pow(beta2, step))).add_(options.eps());
    const auto update = mean.div(1 - std::pow(beta1, step)).div_(scale);
    return update.flatten().narrow(0, 0, grad.numel()).view(grad.sizes());
  }

  // A moment out of its codes, after `move`, which the codes then have.
  template <class Move>
  torch::Tensor moved(size_t i, size_t which, const Move& move) {
    torch::Tensor codes = fsdp::OwnedStep::local(state_of(i).moments()[which]);
    torch::Tensor scales = fsdp::OwnedStep::local(state_of(i).moments()[which + 1]);
    torch::Tensor values = codes.to(torch::kFloat).mul_(scales).div_(kMost);
    move(values);
    scales.copy_(values.abs().amax(1, /*keepdim=*/true));
    codes.copy_(values.div(scales.clamp_min(1e-30)).mul_(kMost).round_());
    return values;
  }

  fsdp::OwnedStep owned_;
};

}  // namespace examples
