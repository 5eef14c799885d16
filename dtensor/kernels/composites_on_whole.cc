#include "dtensor/kernels/composites_on_whole.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_key.h"

#include <algorithm>
#include <array>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 4> kComposites = {{
    {"aten::quantile", ""},
    {"aten::quantile", "scalar"},
    {"aten::nanquantile", ""},
    {"aten::nanquantile", "scalar"},
}};

bool is_dtensor_argument(const c10::IValue& argument) {
  return argument.isTensor() && is_dtensor(argument.toTensor());
}

// This rank's copy of the whole value. Collective where `dtensor` is not replicated.
at::Tensor whole(const at::Tensor& dtensor) {
  const auto replicated = spec_of(dtensor).replicated().placements();
  return differentiable_to_local(differentiable_redistribute(dtensor, replicated));
}

// Threads with generators of their own bring plain tensors here, too: they go on below.
void on_whole(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto* const met = std::find_if(arguments.begin(), arguments.end(), &is_dtensor_argument);
  if (met == arguments.end()) {
    op.redispatchBoxed(keys_below(kFirstKey, keys), stack);
    return;
  }
  const CommOperatorScope moving(op.schema().name());
  const CommCauseScope cause(CommCause::kWhole);
  const DTensorSpec replicated = spec_of(met->toTensor()).replicated();
  for (auto argument = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
       argument != stack->end(); ++argument) {
    if (is_dtensor_argument(*argument)) *argument = whole(argument->toTensor());
  }
  op.callBoxed(stack);
  const at::Tensor result = torch::jit::pop(*stack).toTensor();
  torch::jit::push(
      *stack, differentiable_from_local(
                  result, replicated.with_geometry(result.sizes().vec(), result.strides().vec())));
}

}  // namespace

void register_composites_on_whole(std::vector<c10::RegistrationHandleRAII>& handles) {
  for (const auto& [name, overload] : kComposites) {
    handles.push_back(c10::Dispatcher::singleton().registerImpl(
        {name, overload}, kFirstKey, c10::KernelFunction::makeFromBoxedFunction<&on_whole>(),
        std::nullopt, nullptr, "fsdp DTensor composites"));
  }
}

}  // namespace fsdp::internal
