#include "on_demand/input_cast.h"

#include "dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>

#include <string_view>
#include <vector>

namespace fsdp::internal {
namespace {

ComputeDtype asked_dtype(const GateArguments& arguments) {
  ComputeDtype dtype;
  arguments.for_each([&dtype](const at::Tensor& tensor, bool) {
    if (!meets_gate(tensor)) return;
    const auto* storage = OnDemandStorage::behind(tensor);
    if (storage != nullptr) dtype.meet(*storage, tensor);
  });
  return dtype;
}

// Derivatives compute with what forward saved, in the dtypes that their kernels want: on
// CUDA, the statistics of a norm are float beside weights in 16 bits.
bool keeps_dtypes(const GateArguments& arguments) {
  const std::string_view name = arguments.schema().name();
  if (name.find("_backward") != std::string_view::npos) return true;
  for (const std::string_view other : {"aten::to", "aten::_to_copy", "aten::type_as"}) {
    if (name == other) return true;
  }
  if (name.starts_with("aten::_foreach_")) return true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments.writes(i)) return true;
  }
  return false;
}

// What an operator updates in place without saying so in its schema: running_mean and
// running_var, unless it is told that it does not train.
std::vector<at::Tensor> updated_statistics(const GateArguments& arguments) {
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments.schema().arguments()[i].name();
    const auto& value = arguments[i];
    const bool says_training = name == "training" || name == "train" || name == "use_input_stats";
    if (says_training && value.isBool() && !value.toBool()) return {};
    if (name.starts_with("running_") && value.isTensor() && value.toTensor().defined())
      found.push_back(value.toTensor());
  }
  return found;
}

}  // namespace

bool ComputeDtype::is_to_cast(const at::Tensor& tensor) const {
  return dtype_ && tensor.scalar_type() != *dtype_ && tensor.dim() > 0 &&
         at::isFloatingType(tensor.scalar_type()) && !is_entry_or_view(tensor) &&
         OnDemandStorage::behind(tensor) == nullptr;
}

std::optional<at::ScalarType> dtype_beside(const at::Tensor& parameter, const at::Tensor& input) {
  ComputeDtype dtype;
  const auto* const storage = OnDemandStorage::behind(parameter);
  if (storage != nullptr) dtype.meet(*storage, parameter);
  return dtype.is_to_cast(input) ? dtype.dtype() : std::nullopt;
}

bool call_with_cast_inputs(const c10::OperatorHandle& op, GateArguments& arguments,
                           torch::jit::Stack* stack) {
  const auto dtype = asked_dtype(arguments);
  if (!dtype.is_asked_for() || keeps_dtypes(arguments)) return false;
  const auto statistics = updated_statistics(arguments);
  const bool any = arguments.replace_each([&dtype](const at::Tensor& tensor) {
    return dtype.is_to_cast(tensor) ? dtype.cast(tensor) : at::Tensor();
  });
  if (!any) return false;
  const auto cast = updated_statistics(arguments);
  op.callBoxed(stack);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (!cast[i].is_same(statistics[i])) statistics[i].copy_(cast[i]);
  }
  return true;
}

}  // namespace fsdp::internal
