// They update element by element: element i of every list lies as parameter i. Step
// counters are numbers.
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

at::Tensor value_of_number(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? whole_value(tensor) : tensor;
}

bool is_written(const OperatorCall& call, size_t argument) {
  const auto& written = call.traits().written;
  return std::find(written.begin(), written.end(), argument) != written.end();
}

const std::string& argument_name(const OperatorCall& call, size_t argument) {
  return call.handle().schema().arguments()[argument].name();
}

// This rank's part of element `i` of list `argument`, for a parameter placed as `spec`. A
// gradient that lies elsewhere comes here (collective); a state that does throws, since
// the step writes it.
at::Tensor part_for_parameter(const OperatorCall& call, size_t argument, size_t i,
                              const at::Tensor& tensor, const DTensorSpec& spec) {
  const auto what = [&] {
    return c10::str(call.name(), ": ", argument_name(call, argument), "[", i,
                    "]: ", describe(tensor), ", but self[", i, "] is a DTensor of ",
                    to_string(spec));
  };
  TORCH_CHECK_VALUE(is_dtensor(tensor) && spec_of(tensor).mesh() == spec.mesh(), what(),
                    "; make states with at::zeros_like(parameter) (rank ", spec.mesh().rank(), ")");
  TORCH_CHECK_VALUE(tensor.sizes() == at::IntArrayRef(spec.shape()), what(), " (rank ",
                    spec.mesh().rank(), ")");
  const bool moves = spec_of(tensor).placements() != spec.placements();
  const bool is_gradient = argument_name(call, argument) == "grads";
  TORCH_CHECK_VALUE(!moves || is_gradient || !is_written(call, argument), what(),
                    "; make states with "
                    "at::zeros_like(parameter) (rank ",
                    spec.mesh().rank(), ")");
  return moves ? redistribute_local(local_of(tensor), spec_of(tensor), spec.placements())
               : local_of(tensor);
}

using FusedLists =
    std::vector<std::pair<size_t, std::vector<at::Tensor>>>;  // by argument; empty lists left out

FusedLists fused_lists_of(const OperatorCall& call) {
  FusedLists lists;
  for (size_t a = 0; a < call.argument_count(); ++a) {
    if (!call.argument(a).isTensorList()) continue;
    auto list = call.argument(a).toTensorVector();
    if (!list.empty()) lists.emplace_back(a, std::move(list));
  }
  return lists;
}

void check_parameter_not_partial(const OperatorCall& call, size_t i, const DTensorSpec& spec) {
  for (const auto& placement : spec.placements()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_partial(), call.name(), ": self[", i,
                                "]: a parameter placed ", placement,
                                ". Call .redistribute({Replicate()}) on it first (collective).");
  }
}

void localize_for_parameter(const OperatorCall& call, size_t i, FusedLists& lists) {
  const at::Tensor parameter = lists[0].second[i];
  for (auto& [argument, list] : lists) {
    const bool is_number = argument_name(call, argument) == "state_steps";
    TORCH_CHECK_VALUE(is_number || is_dtensor(parameter) || !is_dtensor(list[i]), call.name(), ": ",
                      argument_name(call, argument), "[", i, "]: a DTensor, but self[", i,
                      "] is a plain tensor");
    if (is_number || !is_dtensor(parameter)) {
      list[i] = value_of_number(list[i]);
    } else {
      list[i] = part_for_parameter(call, argument, i, list[i], spec_of(parameter));
    }
  }
}

// Elements of which this rank holds nothing are left out: kernels need not know empty
// tensors.
void drop_empty_parameters(FusedLists& lists) {
  for (size_t i = lists[0].second.size(); i-- > 0;) {
    if (lists[0].second[i].numel() > 0) continue;
    for (auto& list : lists)
      list.second.erase(list.second.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void step_parameters(OperatorCall& call, const StrategyKernel*) {
  FusedLists lists = fused_lists_of(call);
  for (const auto& [argument, list] : lists) {
    TORCH_CHECK_VALUE(list.size() == lists[0].second.size(), call.name(), ": ",
                      argument_name(call, argument), ": ", list.size(), " tensors, expected ",
                      lists[0].second.size(), ", one per parameter");
  }
  for (size_t i = 0; i < lists[0].second.size(); ++i) {
    if (is_dtensor(lists[0].second[i]))
      check_parameter_not_partial(call, i, spec_of(lists[0].second[i]));
    localize_for_parameter(call, i, lists);
  }
  drop_empty_parameters(lists);
  if (lists[0].second.empty()) return call.finish(std::vector<c10::IValue>{});
  for (auto& [argument, list] : lists) call.argument(argument) = std::move(list);
  for (const char* name : {"lr", "grad_scale", "found_inf"}) {
    c10::IValue* value = call.find_argument(name);
    if (value->isTensor() && value->toTensor().defined())
      *value = value_of_number(value->toTensor());
  }
  call.finish(call.run());
}

}  // namespace

void add_fused_optimizers(OpTable& table) {
  for (const char* name : {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
    table.add(name, {.handler = step_parameters});
}

}  // namespace fsdp::internal
