// The unsharded twin of a sharded model: trained on the whole global batch by every rank
// alone, to show that sharding changes nothing.
#pragma once

#include "programs/trainer/data/batches.h"
#include "programs/trainer/model/transformer.h"

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace programs {

// How far values of the sharded model are from the unsharded one's.
struct Difference {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t unequal = 0;       // elements that are not bit-equal
  int64_t out_of_bound = 0;  // elements that differ by more than rounding explains
  double largest = 0;        // largest absolute difference
  std::string worst;         // the parameter that has it
};
std::string to_string(const Difference& difference);

// Where the two models may round differently.
enum class Rounding {
  kInSumsOverRanks,     // of gradients, in the order of the ranks, as the twin adds them up
  kInSumsOverReplicas,  // of gradients: each replica's ranks, and then the replicas
  kEverywhere,          // tensor parallelism: products are summed in parts
};

class Comparison {
 public:
  // `twin` has the same initial weights as the sharded model; `optimizer` is over the
  // twin's parameters.
  Comparison(Transformer twin, std::unique_ptr<torch::optim::Optimizer> optimizer,
             Rounding rounding);

  // Where sums have another order the twin goes on from the sharded model's parameters at
  // every step: by themselves the two would part, as any two runs do that round
  // differently. Collective.
  void follow(const torch::nn::Module& sharded);
  // Runs the twin on every rank's micro-batch and leaves the mean gradient in its
  // parameters' .grad. Local.
  void forward_backward(const std::vector<Batch>& micro_batches);
  void optimizer_step() { optimizer_->step(); }

  // Both after the backward pass of step 1, before the optimizers' step, with W ranks and
  // g_r the gradient of rank r: gradients may differ by (W - 1) * epsilon * sum_r |g_r|
  // elementwise, and not at all for W <= 2 (sums of two numbers do not depend on the
  // order). With Rounding::kEverywhere they may differ by 2e-5 of a parameter's largest
  // element. `sharded` is put back as it was. Collective.
  Difference compare_gradients(torch::nn::Module& sharded) const;
  // After one SGD step with learning rate `lr`: the same times lr, plus one rounding.
  Difference compare_parameters_after_sgd(torch::nn::Module& sharded, double lr);

  // The sharded model's mean loss over the global batch that forward_backward() saw last.
  void record_sharded_loss(double loss);
  double unsharded_loss() const {
    return unsharded_loss_;
  }  // the twin's; mean over the micro-batches
  double largest_loss_difference() const {
    return largest_loss_difference_;
  }  // relative, over all steps

 private:
  at::Tensor gradient_bound(size_t parameter) const;

  Transformer twin_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Rounding rounding_;
  int64_t world_ = 0;
  std::vector<at::Tensor> absolute_sums_;  // sum_r |g_r|, by parameter
  double unsharded_loss_ = 0;
  double largest_loss_difference_ = 0;
};

// The bound on the relative difference of losses, at every step.
constexpr double kLossTolerance = 2e-6;

}  // namespace programs
