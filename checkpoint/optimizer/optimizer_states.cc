#include "checkpoint/optimizer/optimizer_states.h"

#include "checkpoint/plan/dict_values.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/List.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// The tensors of a field; some may be undefined.
std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// Not scratch that was never filled.
bool is_filled(const c10::IValue& value) {
  const auto tensors = tensors_in(value);
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& each) { return each.defined(); });
}

// None where this rank does not get it.
c10::IValue get_field(const c10::IValue& value, const StateDictOptions& options, bool gets_values,
                      WholeValues& whole) {
  if (!is_filled(value)) return value.isTensor() ? value : c10::IValue();
  if (!value.isTensorList() && !value.isTensor()) return value;
  c10::List<at::Tensor> got;
  for (const at::Tensor& each : tensors_in(value)) {
    const at::Tensor wanted = dict_value(each, options, gets_values, whole);
    if (wanted.defined()) got.push_back(wanted);
  }
  if (value.isTensorList()) return got;
  return got.empty() ? c10::IValue() : c10::IValue(got.get(0));
}

}  // namespace

OptimizerStates::OptimizerStates(const torch::optim::Optimizer& optimizer,
                                 const std::vector<OptimizerGroup>& groups) {
  for (const OptimizerGroup& group : groups) {
    for (const auto& [name, names, parameter, turn] : group) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (turn > 0 || state == optimizer.state().end()) continue;
      const bool is_of_one_rank = is_dtensor(parameter) && spec_of(parameter).mesh().size() == 1;
      states_.push_back({name, unit_of(parameter), is_of_one_rank, fields_of(*state->second)});
    }
  }
}

std::vector<NamedTensor> OptimizerStates::distributed() const {
  std::vector<NamedTensor> tensors;
  for (const State& state : states_) {
    for (const auto& [field, value] : state.fields) {
      if (!is_filled(value)) continue;
      for (const at::Tensor& each : tensors_in(value)) {
        if (is_dtensor(each)) tensors.push_back({state.name + "." + field, each, state.unit});
      }
    }
  }
  return tensors;
}

std::map<std::string, Fields> OptimizerStates::get(const StateDictOptions& options,
                                                   const World& world) const {
  WholeValues whole(distributed(), world);
  std::map<std::string, Fields> got;
  for (const State& state : states_) {
    const bool gets_values = world.rank == 0 || state.is_of_one_rank;
    Fields& fields = got[state.name];
    for (const auto& [field, value] : state.fields) {
      c10::IValue wanted = get_field(value, options, gets_values, whole);
      if (!wanted.isNone()) fields[field] = std::move(wanted);
    }
  }
  return got;
}

std::vector<std::string> OptimizerStates::of_one_rank(const World& world) const {
  std::vector<std::string> names;
  for (const State& state : states_) {
    if (state.is_of_one_rank && world.size > 1) names.push_back(state.name);
  }
  return names;
}

}  // namespace fsdp::internal::checkpoint
