// Element i of every list together is sharded as the operands of the elementwise operator
// are.
#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dispatch/sharding_propagator.h"
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/same_placements.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/max.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// What element i of the lists comes to on this rank.
struct PlacedElement {
  Operands locals;
  std::optional<DTensorSpec> result;  // none: plain, or written
  std::optional<DTensorSpec> moved;   // where what is written had to go
};

struct WrittenElsewhere {
  at::Tensor dtensor, local;
  DTensorSpec spec;  // of local
};

bool lie_alike(at::TensorList operands, std::optional<size_t> written) {
  SamePlacements operands_met;
  for (const at::Tensor& operand : operands) operands_met.look(operand);
  return operands_met.alike() && operands_met.is_dense() &&
         (!written || is_dtensor(operands[*written]));
}

// As the elementwise operator has them. Collective where one must move.
PlacedElement placed_element(const OperatorCall& call, at::TensorList operands,
                             const ShardingPropagator& plans) {
  PlacedElement placed;
  const auto written = plans.op().written;
  if (lie_alike(operands, written)) {
    for (const at::Tensor& operand : operands) placed.locals.push_back(held_part(operand));
    if (!written)
      placed.result = spec_of(*std::find_if(operands.begin(), operands.end(), is_dtensor));
    return placed;
  }
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto plan = plans.sharding_of(call, operands, mesh);
  placed.locals = place_operands(operands, plan->targets);
  if (!written) placed.result = DTensorSpec(mesh, plan->results[0]);
  if (written && is_dtensor(operands[*written]) &&
      spec_of(operands[*written]).placements() != plan->targets[*written])
    placed.moved = DTensorSpec(mesh, plan->placed[*written]);
  return placed;
}

// The arguments of a foreach operator: lists of one length, and single tensors that meet
// every element.
class ForeachLists {
 public:
  explicit ForeachLists(const OperatorCall& call) {
    for (size_t i = 0; i < call.argument_count(); ++i) {
      const c10::IValue& argument = call.argument(i);
      if (argument.isTensorList()) {
        list_arguments_.push_back(i);
        lists_.push_back(argument.toTensorVector());
      } else if (argument.isTensor() && argument.toTensor().defined() && !is_scalar_list(call, i)) {
        single_arguments_.push_back(i);
        singles_.push_back(argument.toTensor());
      }
    }
  }

  size_t length() const { return lists_[0].size(); }

  // Once the operator ran: what could not be written where it lies was written elsewhere.
  void bring_back() const {
    for (const auto& [written, local, spec] : written_elsewhere_)
      local_of(written).copy_(redistribute_local(local, spec, spec_of(written).placements()));
  }

  // Replaces element i by local tensors. Returns the result's spec, none where no DTensor
  // is involved, or the element is written.
  std::optional<DTensorSpec> localize(size_t i, const ShardingPropagator& plans,
                                      const OperatorCall& call) {
    std::vector<at::Tensor> operands;
    operands.reserve(lists_.size() + singles_.size());
    for (const auto& list : lists_) operands.push_back(list.at(i));
    operands.insert(operands.end(), singles_.begin(), singles_.end());
    if (std::none_of(operands.begin(), operands.end(), is_dtensor)) return std::nullopt;
    auto placed = placed_element(call, operands, plans);
    const auto written = plans.op().written;
    if (placed.moved)
      written_elsewhere_.push_back({operands[*written], placed.locals[*written], *placed.moved});
    for (size_t k = 0; k < lists_.size(); ++k) lists_[k][i] = std::move(placed.locals[k]);
    local_singles_.assign(placed.locals.begin() + static_cast<std::ptrdiff_t>(lists_.size()),
                          placed.locals.end());
    return placed.result;
  }

  void put_back(OperatorCall& call) {
    for (size_t k = 0; k < lists_.size(); ++k)
      call.argument(list_arguments_[k]) = std::move(lists_[k]);
    for (size_t k = 0; k < local_singles_.size(); ++k)
      call.argument(single_arguments_[k]) = local_singles_[k];
  }

 private:
  // _foreach_addcmul.Tensor and its like take their scalars, one per element, as a plain
  // tensor.
  static bool is_scalar_list(const OperatorCall& call, size_t i) {
    if (call.handle().schema().arguments()[i].name() != "scalars") return false;
    TORCH_CHECK_VALUE(!is_dtensor(call.argument(i).toTensor()), call.name(),
                      ": scalars: a DTensor; pass ", ".full_tensor() (collective)");
    return true;
  }

  std::vector<size_t> list_arguments_;
  std::vector<size_t> single_arguments_;
  std::vector<std::vector<at::Tensor>> lists_;
  std::vector<at::Tensor> singles_;
  std::vector<at::Tensor> local_singles_;
  std::vector<WrittenElsewhere> written_elsewhere_;
};

// Of elementwise operators of one linearity: those that write their first list, and those
// that make a new one.
struct ForeachPlans {
  explicit ForeachPlans(Linearity linearity)
      : writing(PlannedOperator(pointwise(linearity), /*written=*/0)),
        making(PlannedOperator(pointwise(linearity), std::nullopt)) {}

  ShardingPropagator writing, making;
};

void run_on_lists(OperatorCall& call, const ShardingPropagator& plans) {
  ForeachLists lists(call);
  std::vector<std::optional<DTensorSpec>> specs;
  specs.reserve(lists.length());
  for (size_t i = 0; i < lists.length(); ++i) specs.push_back(lists.localize(i, plans, call));
  lists.put_back(call);
  auto results = call.run();
  lists.bring_back();
  if (!results.empty()) {
    auto tensors = results[0].toTensorVector();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (specs[i]) tensors[i] = make_dtensor(tensors[i], *specs[i]);
    }
    results[0] = std::move(tensors);
  }
  call.finish(std::move(results));
}

OpHandler foreach_elementwise(Linearity linearity) {
  return [plans = std::make_shared<const ForeachPlans>(linearity)](OperatorCall& call,
                                                                   const StrategyKernel*) {
    run_on_lists(call, call.traits().written.empty() ? plans->making : plans->writing);
  };
}

void copy_each(OperatorCall& call, const StrategyKernel*) {
  const auto written = call.argument(0).toTensorVector();
  const auto source = call.argument(1).toTensorVector();
  for (size_t i = 0; i < written.size(); ++i) written[i].copy_(source.at(i));
  call.finish(std::vector<c10::IValue>{});
}

void max_of_each(OperatorCall& call, const StrategyKernel*) {
  auto maxima = call.argument(0).toTensorVector();
  for (at::Tensor& tensor : maxima) tensor = tensor.max();
  call.finish(std::move(maxima));
}

constexpr const char* kPlainForeach[] = {
    "abs",       "acos", "addcdiv",    "addcmul", "asin",  "atan",    "ceil",  "clamp_max",
    "clamp_min", "cos",  "cosh",       "erf",     "erfc",  "exp",     "expm1", "floor",
    "frac",      "lerp", "lgamma",     "log",     "log10", "log1p",   "log2",  "maximum",
    "minimum",   "pow",  "reciprocal", "round",   "rsqrt", "sigmoid", "sign",  "sin",
    "sinh",      "sqrt", "tan",        "tanh",    "trunc"};

}  // namespace

void add_foreach(OpTable& table) {
  const auto add = [&table](const std::string& name, const OpHandler& handler) {
    table.add_with_in_place("_foreach_" + name, {.handler = handler});
  };
  const OpHandler not_linear = foreach_elementwise(Linearity::kNone),
                  sum = foreach_elementwise(Linearity::kSum);
  for (const char* name : kPlainForeach) add(name, not_linear);
  for (const char* name : {"add", "sub"}) add(name, sum);
  for (const char* name : {"add.Scalar", "add.ScalarList", "sub.Scalar", "sub.ScalarList"})
    add(name, not_linear);
  add("mul", foreach_elementwise(Linearity::kProduct));
  add("div", foreach_elementwise(Linearity::kScale));
  add("neg", foreach_elementwise(Linearity::kUnary));
  table.add_with_in_place("_foreach_zero",
                          {.handler = foreach_elementwise(Linearity::kAny), .overwrites = true});
  table.add("_foreach_copy_", {.handler = copy_each, .overwrites = true});
  table.add("_foreach_max.", {.handler = max_of_each});
}

}  // namespace fsdp::internal
