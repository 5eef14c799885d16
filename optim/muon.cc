#include "optim/muon.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "optim/internal/orthogonalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fsdp {
namespace {

const MuonOptions& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const MuonOptions&>(group.options());
}

internal::MatrixOptions matrix_options(const MuonOptions& options) {
  return {.matrix_rows = options.matrix_rows(),
          .leading_dims_are_batch = options.leading_dims_are_batch()};
}

internal::NewtonSchulz iteration_of(const MuonOptions& options) {
  const auto& [a, b, c] = options.ns_coefficients();
  return {.a = a, .b = b, .c = c, .eps = options.eps(), .steps = options.ns_steps()};
}

void check_number(bool is_right, const char* name, double value, const char* allowed,
                  size_t group) {
  TORCH_CHECK_VALUE(is_right, "Muon: ", name, " is ", value, ", expected ", allowed, " (group ",
                    group, ")");
}

void check_options(const MuonOptions& options, size_t group) {
  check_number(options.lr() >= 0, "lr", options.lr(), "0 or more", group);
  check_number(options.weight_decay() >= 0, "weight_decay", options.weight_decay(), "0 or more",
               group);
  check_number(options.momentum() >= 0, "momentum", options.momentum(), "0 or more", group);
  check_number(options.eps() >= 0, "eps", options.eps(), "0 or more", group);
  check_number(options.ns_steps() >= 0 && options.ns_steps() < 100, "ns_steps",
               static_cast<double>(options.ns_steps()), "0 to 99", group);
}

std::string place_of(size_t group, size_t position) {
  return c10::str("parameter ", position, " of group ", group);
}

void check_parameter(const at::Tensor& param, const MuonOptions& options, size_t group,
                     size_t position) {
  const auto place = place_of(group, position);
  TORCH_CHECK_VALUE(param.defined(), "Muon: ", place, " is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(!param.is_complex(), "Muon: ", place, " is complex (",
                              param.scalar_type(), "), expected real numbers");
  try {
    internal::matrices_of(param.sizes().vec(), matrix_options(options));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "Muon: ", place, ": ", error.what(),
                      ". Give embeddings, norms and biases to another optimizer");
  }
}

void check_gradient(const at::Tensor& grad, size_t group, size_t position) {
  TORCH_CHECK_NOT_IMPLEMENTED(grad.layout() == c10::kStrided, "Muon: the gradient of ",
                              place_of(group, position), " is sparse, expected a dense one");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dtensor(grad) || !internal::spec_of(grad).has_partial(),
                              "Muon: the gradient of ", place_of(group, position),
                              " is Partial: a sum that nobody has added up. Redistribute it first");
}

// Of a matrix of these sides.
double adjusted(double lr, AdjustLr adjust, const internal::Matrices& matrices) {
  const auto rows = static_cast<double>(matrices.rows);
  const auto columns = static_cast<double>(matrices.columns);
  return adjust == AdjustLr::kOriginal ? lr * std::sqrt(std::max(1.0, rows / columns))
                                       : lr * (0.2 * std::sqrt(std::max(rows, columns)));
}

// As the parameter lies.
at::Tensor placed_gradient(const at::Tensor& param) {
  const at::Tensor& grad = param.grad();
  if (!is_dtensor(param) || !is_dtensor(grad)) return grad;
  const auto& placements = internal::spec_of(param).placements();
  return internal::spec_of(grad).placements() == placements
             ? grad
             : DTensor(grad).redistribute(placements);
}

struct Stepped {
  at::Tensor param, grad;
  const MuonOptions& options;
  MuonParamState& state;
};

// Momentum, with Nesterov's look ahead.
at::Tensor update_of(const Stepped& stepped) {
  if (!stepped.state.momentum_buffer().defined())
    stepped.state.momentum_buffer(at::zeros_like(stepped.grad));
  auto& buffer = stepped.state.momentum_buffer();
  const double momentum = stepped.options.momentum();
  buffer.lerp_(stepped.grad, 1 - momentum);
  return stepped.options.nesterov() ? stepped.grad.lerp(buffer, momentum) : buffer;
}

void apply(Stepped& stepped, const at::Tensor& direction) {
  const auto& options = stepped.options;
  const auto matrices = internal::matrices_of(stepped.param.sizes().vec(), matrix_options(options));
  stepped.param.mul_(1 - options.lr() * options.weight_decay());
  stepped.param.add_(direction, -adjusted(options.lr(), options.adjust_lr(), matrices));
}

}  // namespace

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
  check_groups();
}

Muon::Muon(std::vector<torch::Tensor> params, MuonOptions defaults)
    : Muon({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

void Muon::check_groups() const {
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    const auto& options = options_of(param_groups_[group]);
    TORCH_CHECK_VALUE(!params.empty(), "Muon: group ", group,
                      " has no parameters, expected the matrices of hidden layers");
    check_options(options, group);
    for (size_t i = 0; i < params.size(); ++i) check_parameter(params[i], options, group, i);
  }
}

torch::Tensor Muon::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  check_groups();
  std::vector<Stepped> stepped;
  std::vector<internal::ToOrthogonalize> items;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = options_of(param_groups_[group]);
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!params[i].grad().defined()) continue;
      check_gradient(params[i].grad(), group, i);
      auto& state = state_[params[i].unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<MuonParamState>();
      stepped.push_back(
          {params[i], placed_gradient(params[i]), options, static_cast<MuonParamState&>(*state)});
      items.push_back({stepped.back().grad, matrix_options(options), iteration_of(options)});
    }
  }
  counters_ = {};
  internal::orthogonalize(
      items, [&](size_t i) { return update_of(stepped[i]); },
      [&](size_t i, const at::Tensor& direction) { apply(stepped[i], direction); }, counters_);
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const { serialize(*this, archive); }
void Muon::load(torch::serialize::InputArchive& archive) { serialize(*this, archive); }

}  // namespace fsdp
