// Shampoo (Gupta, Koren, Singer, "Shampoo: Preconditioned Stochastic Tensor
// Optimization", 2018), Adagrad of matrices, however they are sharded: an optimizer of
// one's own that needs whole tensors, written with fsdp::OwnedStep.
//
//   examples::Shampoo shampoo(fsdp::split_for_muon(*model).matrices(), {1e-2});
#pragma once

#include "optim/owned_step.h"

#include <ATen/ops/linalg_eigh.h>
#include <torch/optim/adagrad.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <memory>
#include <vector>

namespace examples {

// Sums of G G^T and of G^T G, on the rank that computes with the matrix.
struct ShampooParamState : torch::optim::OptimizerCloneableParamState<ShampooParamState> {
  TORCH_ARG(torch::Tensor, left);
  TORCH_ARG(torch::Tensor, right);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(left);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(right);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    using torch::Tensor;
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, left);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, right);
  }
};

class Shampoo : public torch::optim::Optimizer {
 public:
  using Options = torch::optim::AdagradOptions;  // of which it knows lr and eps

  explicit Shampoo(const std::vector<torch::Tensor>& matrices, Options options = {})
      : Optimizer(std::vector<torch::Tensor>(matrices), std::make_unique<Options>(options)),
        owned_(matrices, {.optimizer = "Shampoo", .cost = cost_of}) {
    for (size_t i = 0; i < matrices.size(); ++i) state_of(i);
  }

  torch::Tensor step(LossClosure closure = nullptr) override {
    const auto loss = closure ? closure() : torch::Tensor();
    const torch::NoGradGuard no_grad;
    const double lr = param_groups_[0].options().get_lr();
    std::vector<size_t> positions;
    for (size_t i = 0; i < params().size(); ++i)
      if (params()[i].grad().defined()) positions.push_back(i);
    owned_.run(positions, {.input = [&](size_t i) { return params()[i].grad(); },
                           .compute = [&](size_t i, const auto& g) { return update_of(i, g); },
                           .apply = [&](size_t i, const auto& u) { params()[i].add_(u, -lr); }});
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<ShampooParamState, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<ShampooParamState, Options>(archive, *this);
  }

 private:
  std::vector<torch::Tensor>& params() { return param_groups_[0].params(); }

  ShampooParamState& state_of(size_t i) {
    auto& state = state_[params()[i].unsafeGetTensorImpl()];
    if (!state) {
      auto fresh = std::make_unique<ShampooParamState>();
      fresh->left(first_factor(i, params()[i].size(0)));
      fresh->right(first_factor(i, params()[i].size(1)));
      state = std::move(fresh);
    }
    return static_cast<ShampooParamState&>(*state);
  }

  torch::Tensor first_factor(size_t i, int64_t size) {
    torch::Tensor sum = owned_.zeros(i, {size, size});
    const auto& options = static_cast<const Options&>(param_groups_[0].options());
    if (owned_.computes(i)) fsdp::OwnedStep::local(sum).fill_diagonal_(options.eps());
    return sum;
  }

  torch::Tensor update_of(size_t i, const torch::Tensor& grad) {
    torch::Tensor left = fsdp::OwnedStep::local(state_of(i).left());
    torch::Tensor right = fsdp::OwnedStep::local(state_of(i).right());
    left.addmm_(grad, grad.t());
    right.addmm_(grad.t(), grad);
    return inverse_fourth_root(left).mm(grad).mm(inverse_fourth_root(right));
  }

  static torch::Tensor inverse_fourth_root(const torch::Tensor& factor) {
    const auto [values, vectors] = at::linalg_eigh(factor);
    return vectors.mul(values.clamp_min(1e-12).pow(-0.25)).mm(vectors.t());
  }

  // Of eigh(), which is most of a step.
  static double cost_of(at::IntArrayRef shape) {
    const auto rows = static_cast<double>(shape[0]), columns = static_cast<double>(shape[1]);
    return rows * rows * rows + columns * columns * columns;
  }

  fsdp::OwnedStep owned_;
};

}  // namespace examples
