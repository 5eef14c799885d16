#include "programs/trainer/comparison.h"

#include "dtensor/dtensor.h"
#include "programs/trainer/batch_loss.h"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

namespace programs {
namespace {

constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

// The whole value on every rank, with whatever it is distributed over gathered.
at::Tensor full(const at::Tensor& tensor) {
  return fsdp::is_dtensor(tensor) ? fsdp::DTensor(tensor).full_tensor() : tensor;
}

// Differences are taken in double, so that the comparison itself does not round.
void add(Difference& sum, const std::string& name, const at::Tensor& actual,
         const at::Tensor& expected, const at::Tensor& bound) {
  auto error = (actual.to(torch::kDouble) - expected.to(torch::kDouble)).abs();
  sum.tensors += 1;
  sum.elements += actual.numel();
  sum.unequal += actual.ne(expected).sum().item<int64_t>();
  sum.out_of_bound += error.le(bound).logical_not().sum().item<int64_t>();  // counts NaN too
  const double largest = error.numel() > 0 ? error.max().item<double>() : 0.0;
  if (!(largest <= sum.largest)) {
    sum.largest = largest;
    sum.worst = name;
  }
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

// One step of plain SGD that can be taken back.
class TrialStep {
 public:
  TrialStep(std::vector<at::Tensor> parameters, double lr)
      : parameters_(std::move(parameters)), saved_(copies(parameters_)) {
    torch::optim::SGD(parameters_, torch::optim::SGDOptions(lr)).step();
  }
  void undo() {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].copy_(saved_[i]);
  }

 private:
  std::vector<at::Tensor> parameters_, saved_;
};

}  // namespace

std::string to_string(const Difference& difference) {
  std::ostringstream text;
  text << difference.tensors << " tensors, " << difference.elements << " elements: ";
  if (difference.unequal == 0) {
    text << "bit-equal";
  } else {
    text << difference.unequal << " differ, by at most " << difference.largest << " ("
         << difference.worst << "), " << difference.out_of_bound << " beyond the bound";
  }
  return text.str();
}

Comparison::Comparison(Transformer twin, std::unique_ptr<torch::optim::Optimizer> optimizer,
                       Rounding rounding)
    : twin_(std::move(twin)), optimizer_(std::move(optimizer)), rounding_(rounding) {}

void Comparison::follow(const torch::nn::Module& sharded) {
  if (rounding_ == Rounding::kInSumsOverRanks) return;
  torch::NoGradGuard no_grad;
  const auto theirs = sharded.parameters();
  const auto ours = twin_->parameters();
  for (size_t i = 0; i < ours.size(); ++i) ours[i].copy_(full(theirs[i]));
}

void Comparison::forward_backward(const std::vector<Batch>& micro_batches) {
  world_ = static_cast<int64_t>(micro_batches.size());
  absolute_sums_.clear();
  const auto parameters = twin_->parameters();
  std::vector<at::Tensor> sums;
  double loss_sum = 0;
  const double target_count = mean_target_count(micro_batches);
  for (const auto& batch : micro_batches) {
    twin_->zero_grad();
    auto loss = batch_loss(twin_, batch, target_count);
    loss.backward();
    loss_sum += loss.item<double>();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      const bool first = sums.size() == i;
      if (first)
        absolute_sums_.push_back(gradient.abs());
      else
        absolute_sums_[i].add_(gradient.abs());
      if (first)
        sums.push_back(gradient);
      else
        sums[i].add_(gradient);
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() = sums[i].div_(world_);
  unsharded_loss_ = loss_sum / static_cast<double>(world_);
}

at::Tensor Comparison::gradient_bound(size_t parameter) const {
  auto sum = absolute_sums_[parameter].to(torch::kDouble);
  if (rounding_ == Rounding::kEverywhere)
    return torch::full_like(sum, 2e-5 * (sum.max() / world_).item<double>());
  return world_ <= 2 ? torch::zeros_like(sum) : sum * (static_cast<double>(world_ - 1) * kEpsilon);
}

Difference Comparison::compare_gradients(torch::nn::Module& sharded) const {
  torch::NoGradGuard no_grad;
  Difference difference;
  const auto expected = twin_->parameters();
  size_t i = 0;
  for (const auto& parameter : sharded.named_parameters()) {
    add(difference, parameter.key(), full(parameter.value().grad()), expected[i].grad(),
        gradient_bound(i));
    ++i;
  }
  return difference;
}

Difference Comparison::compare_parameters_after_sgd(torch::nn::Module& sharded, double lr) {
  torch::NoGradGuard no_grad;
  Difference difference;
  const auto expected = twin_->parameters();
  TrialStep sharded_step(sharded.parameters(), lr), unsharded_step(expected, lr);
  size_t i = 0;
  for (const auto& parameter : sharded.named_parameters()) {
    auto bound = gradient_bound(i) * lr;
    if (world_ > 2 || rounding_ == Rounding::kEverywhere)
      bound += expected[i].abs().to(torch::kDouble) * kEpsilon;
    add(difference, parameter.key(), full(parameter.value()), expected[i], bound);
    ++i;
  }
  sharded_step.undo();
  unsharded_step.undo();
  return difference;
}

void Comparison::record_sharded_loss(double loss) {
  const double relative = std::abs(loss - unsharded_loss_) / std::abs(unsharded_loss_);
  if (!(relative <= largest_loss_difference_)) largest_loss_difference_ = relative;
}

}  // namespace programs
