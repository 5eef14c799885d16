#include "optim/internal/muon_groups.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "optim/internal/orthogonalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fsdp::internal {
namespace {

MatrixOptions matrix_options(const MuonOptions& options) {
  return {.matrix_rows = options.matrix_rows(),
          .leading_dims_are_batch = options.leading_dims_are_batch()};
}

NewtonSchulz iteration_of(const MuonOptions& options) {
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
    matrices_of(param.sizes().vec(), matrix_options(options));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "Muon: ", place, ": ", error.what(),
                      ". Give embeddings, norms and biases to another optimizer");
  }
}

void check_gradient(const at::Tensor& grad, size_t group, size_t position) {
  TORCH_CHECK_NOT_IMPLEMENTED(grad.layout() == c10::kStrided, "Muon: the gradient of ",
                              place_of(group, position), " is sparse, expected a dense one");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dtensor(grad) || !spec_of(grad).has_partial(),
                              "Muon: the gradient of ", place_of(group, position),
                              " is Partial: a sum that nobody has added up. Redistribute it first");
}

void check_gradients(const torch::optim::OptimizerParamGroup& group, size_t number) {
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& grad = group.params()[i].grad();
    if (grad.defined()) check_gradient(grad, number, i);
  }
}

// Of a matrix of these sides.
double adjusted(double lr, AdjustLr adjust, const Matrices& matrices) {
  const auto rows = static_cast<double>(matrices.rows);
  const auto columns = static_cast<double>(matrices.columns);
  return adjust == AdjustLr::kOriginal ? lr * std::sqrt(std::max(1.0, rows / columns))
                                       : lr * (0.2 * std::sqrt(std::max(rows, columns)));
}

// As the parameter lies.
at::Tensor placed_gradient(const at::Tensor& param) {
  const at::Tensor& grad = param.grad();
  if (!is_dtensor(param) || !is_dtensor(grad)) return grad;
  const auto& placements = spec_of(param).placements();
  return spec_of(grad).placements() == placements ? grad : DTensor(grad).redistribute(placements);
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
  const auto matrices = matrices_of(stepped.param.sizes().vec(), matrix_options(options));
  stepped.param.mul_(1 - options.lr() * options.weight_decay());
  stepped.param.add_(direction, -adjusted(options.lr(), options.adjust_lr(), matrices));
}

// What is stepped in a step, and what is orthogonalized of it.
class MuonStep {
 public:
  explicit MuonStep(OptimizerState& state) : state_(state) {}

  void add(const torch::optim::OptimizerParamGroup& group) {
    const auto& options = *muon_options(group);
    for (const auto& param : group.params()) {
      if (!param.grad().defined()) continue;
      auto& state = state_[param.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<MuonParamState>();
      stepped_.push_back(
          {param, placed_gradient(param), options, static_cast<MuonParamState&>(*state)});
      items_.push_back({stepped_.back().grad, matrix_options(options), iteration_of(options)});
    }
  }

  void run(MuonCounters& counters) {
    orthogonalize(
        items_, [&](size_t i) { return update_of(stepped_[i]); },
        [&](size_t i, const at::Tensor& direction) { apply(stepped_[i], direction); }, counters);
  }

 private:
  OptimizerState& state_;
  std::vector<Stepped> stepped_;
  std::vector<ToOrthogonalize> items_;
};

}  // namespace

const MuonOptions* muon_options(const torch::optim::OptimizerParamGroup& group) {
  return dynamic_cast<const MuonOptions*>(&group.options());
}

void keep_options(std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const std::vector<torch::optim::OptimizerParamGroup>& given) {
  const size_t first = groups.size() - given.size();
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i].has_options()) groups[first + i].set_options(given[i].options().clone());
}

void keep_group(std::vector<torch::optim::OptimizerParamGroup>& groups,
                const torch::optim::OptimizerParamGroup& given,
                const std::function<void()>& check) {
  keep_options(groups, {given});
  try {
    check();
  } catch (...) {
    groups.pop_back();
    throw;
  }
}

void check_muon_group(const torch::optim::OptimizerParamGroup& group, size_t number) {
  const auto& options = *muon_options(group);
  TORCH_CHECK_VALUE(!group.params().empty(), "Muon: group ", number,
                    " has no parameters, expected the matrices of hidden layers");
  check_options(options, number);
  for (size_t i = 0; i < group.params().size(); ++i)
    check_parameter(group.params()[i], options, number, i);
}

torch::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode with_grad(true);
  return closure();
}

void step_muon_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      OptimizerState& state, MuonCounters& counters) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < groups.size(); ++i)
    if (muon_options(groups[i]) != nullptr) check_gradients(groups[i], i);
  MuonStep step(state);
  for (const auto& group : groups)
    if (muon_options(group) != nullptr) step.add(group);
  counters = {};
  step.run(counters);
}

}  // namespace fsdp::internal
