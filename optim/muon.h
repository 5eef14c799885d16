// Muon: momentum whose update is orthogonalized, for the matrices of hidden layers. As
// torch.optim.Muon, with its names, defaults and state, and for parameters however they
// are sharded:
//
//   fsdp::Muon muon(matrices, fsdp::MuonOptions(2e-2).weight_decay(0.01));
//   torch::optim::AdamW adamw(others, 3e-4);   // embeddings, norms, biases, the head
//   muon.step();
//   adamw.step();
//
// Each matrix is orthogonalized once in the world of its mesh: where ranks hold parts of
// it, they send these in bf16 to one rank, its owner, and get back the direction, in
// bf16. Owners are dealt out by the cost of the iteration, anew in each step and on all
// ranks alike. What is whole on a rank is computed there, and nothing is sent: a plain
// tensor, a replicated one, an expert of a stack that is cut along its experts.
//
// State lies as its parameter. Steps of plain and of sharded fp32 or fp64 parameters have
// the same bits, given the same gradients.
#pragma once

#include "device_mesh/api.h"

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp {

// What the learning rate of a matrix of `rows` x `columns` is multiplied by.
enum class AdjustLr {
  kOriginal,       // sqrt(max(1, rows / columns))
  kMatchRmsAdamW,  // 0.2 sqrt(max(rows, columns)): rates and decays tuned for AdamW fit
};

struct FSDP_API MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3);
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, weight_decay) = 0.1;  // decoupled: of lr without adjustment
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  using Coefficients = std::tuple<double, double, double>;
  TORCH_ARG(Coefficients, ns_coefficients) = {3.4445, -4.7750, 2.0315};
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(AdjustLr, adjust_lr) = AdjustLr::kOriginal;
  // For 2-D parameters: so many rows at a time are a matrix of their own, such as the
  // rows of a head. The number must divide the rows. 0: a parameter is one matrix.
  TORCH_ARG(int64_t, matrix_rows) = 0;
  // The last two dimensions are a matrix, and those in front of them count matrices, such
  // as experts. Else every parameter has two dimensions.
  TORCH_ARG(bool, leading_dims_are_batch) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

FSDP_API bool operator==(const MuonOptions& lhs, const MuonOptions& rhs);

struct FSDP_API MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(torch::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

FSDP_API bool operator==(const MuonParamState& lhs, const MuonParamState& rhs);

// What a step cost one rank.
struct MuonCounters {
  int64_t matrices = 0;        // that were orthogonalized here
  double work = 0;             // of those: the sum of s^2 (2 l + s), with sides s <= l
  int64_t exchanges = 0;       // with owners, both ways
  int64_t received_bytes = 0;  // from other ranks, by those exchanges
};

class FSDP_API Muon : public torch::optim::Optimizer {
 public:
  // Throws ValueError for options out of range and for parameters that are no matrices
  // under theirs, and NotImplementedError for complex ones, naming group and position.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                MuonOptions defaults = {});
  explicit Muon(std::vector<torch::Tensor> params, MuonOptions defaults = {});
  // One group more; it may have no options: the defaults. Throws as the constructor, and
  // adds nothing then. Local; every rank must do the same. (LibTorch's, called through an
  // Optimizer&, takes the defaults in the place of MuonOptions from 2.15 on.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Collective over the meshes of the parameters that are cut; parameters without a
  // gradient are left out, which all ranks must do alike. Throws, before anything is
  // changed, as the constructor does, and NotImplementedError for sparse and Partial
  // gradients; and as collectives do: an error that names both ranks where they do not
  // step the same matrices, after which the mesh's groups are refused.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Of the last step.
  const MuonCounters& counters() const { return counters_; }

 private:
  template <typename Self, typename Archive>
  static void serialize(Self& self, Archive& archive) {
    _TORCH_OPTIM_SERIALIZE_WITH_TEMPLATE_ARG(Muon);
  }
  void check_groups() const;

  MuonCounters counters_;
};

}  // namespace fsdp
