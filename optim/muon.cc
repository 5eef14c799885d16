#include "optim/muon.h"

#include "optim/internal/muon_groups.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

namespace fsdp {

MuonOptions::MuonOptions(double lr) : lr_(lr) {}

bool operator==(const MuonOptions& lhs, const MuonOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.weight_decay() == rhs.weight_decay() &&
         lhs.momentum() == rhs.momentum() && lhs.nesterov() == rhs.nesterov() &&
         lhs.ns_coefficients() == rhs.ns_coefficients() && lhs.eps() == rhs.eps() &&
         lhs.ns_steps() == rhs.ns_steps() && lhs.adjust_lr() == rhs.adjust_lr() &&
         lhs.matrix_rows() == rhs.matrix_rows() &&
         lhs.leading_dims_are_batch() == rhs.leading_dims_are_batch();
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  const auto matches = static_cast<int64_t>(adjust_lr());
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  archive.write("adjust_lr", c10::IValue(matches));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(matrix_rows);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(leading_dims_are_batch);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  using torch::Tensor;
  c10::IValue adjustment;
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Coefficients, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  archive.read("adjust_lr", adjustment);
  adjust_lr(static_cast<AdjustLr>(adjustment.toInt()));
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, matrix_rows);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, leading_dims_are_batch);
}

double MuonOptions::get_lr() const { return lr(); }
void MuonOptions::set_lr(double lr) { this->lr(lr); }

bool operator==(const MuonParamState& lhs, const MuonParamState& rhs) {
  return torch::equal(lhs.momentum_buffer(), rhs.momentum_buffer());
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  using torch::Tensor;
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, momentum_buffer);
}

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, MuonOptions defaults)
    : Optimizer(param_groups, std::make_unique<MuonOptions>(defaults)) {
  internal::keep_options(param_groups_, param_groups);
  check_groups();
}

Muon::Muon(std::vector<torch::Tensor> params, MuonOptions defaults)
    : Muon({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  internal::keep_group(param_groups_, group, [this] { check_groups(); });
}

void Muon::check_groups() const {
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    TORCH_CHECK_VALUE(internal::muon_options(param_groups_[i]) != nullptr, "Muon: group ", i,
                      " has options of another optimizer, expected MuonOptions");
    internal::check_muon_group(param_groups_[i], i);
  }
}

torch::Tensor Muon::step(LossClosure closure) {
  const auto loss = internal::loss_of(closure);
  check_groups();
  internal::step_muon_groups(param_groups_, state_, counters_);
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const { serialize(*this, archive); }
void Muon::load(torch::serialize::InputArchive& archive) { serialize(*this, archive); }

}  // namespace fsdp
