// Muon for the matrices of hidden layers and AdamW for the rest as one optimizer: one
// step, one scheduler of learning rates, one entry of a checkpoint.
//
//   fsdp::MuonWithAdamW optimizer(fsdp::split_for_muon(*model), fsdp::MuonOptions(2e-2),
//                                 torch::optim::AdamWOptions(3e-4));
//   fsdp::save({.model = model, .optimizer = optimizer}, "checkpoint");
//
// A group is Muon's or AdamW's by the class of its options, and its state is as that
// optimizer's own. The steps are theirs, too, with the same bits.
#pragma once

#include "device_mesh/api.h"
#include "optim/muon.h"
#include "optim/split_for_muon.h"

#include <torch/optim/adamw.h>

#include <vector>

namespace fsdp {

class FSDP_API MuonWithAdamW : public torch::optim::Optimizer {
 public:
  // Group 0 has the matrices and group 1 the others; a group without parameters is left
  // out. Throws as Muon's constructor does.
  explicit MuonWithAdamW(const MuonSplit& split, MuonOptions muon = {},
                         torch::optim::AdamWOptions adamw = {});
  // Groups of one's own, each with MuonOptions or AdamWOptions, in any order and number.
  // Throws ValueError for one without options or with others.
  explicit MuonWithAdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);
  // As Muon::add_param_group(); throws as the constructor.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Muon's groups first, then AdamW's. Collective and throws as Muon::step().
  torch::Tensor step(LossClosure closure = nullptr) override;
  // In the form that LibTorch's optimizers have. load() throws c10::Error, having changed
  // nothing, for other groups.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Of the last step's Muon groups.
  const MuonCounters& counters() const { return counters_; }

 private:
  void check_groups() const;
  void step_adamw_groups();

  MuonCounters counters_;
};

}  // namespace fsdp
