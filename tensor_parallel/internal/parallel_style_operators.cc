#include "tensor_parallel/internal/parallel_style_operators.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/input_cast.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/first_inputs.h"
#include "tensor_parallel/internal/gradient_placement.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parallel_member.h"
#include "tensor_parallel/internal/placed_input.h"
#include "tensor_parallel/internal/row_lookup.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;
using OptionalUse = std::optional<Use>;

at::Tensor tensor_at(const GateArguments& arguments, size_t index) {
  return arguments[index].isTensor() ? arguments[index].toTensor() : at::Tensor();
}

// Collective in a model's first steps.
GateArguments compared_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const GateArguments arguments(op, stack);
  if (FirstSteps::any()) compare_first_inputs(op, arguments);
  return arguments;
}

// Null where no style acts. None does in derivatives: the products of second ones look
// like those of a forward, and what autograd adds up must be of one kind, plain or a
// DTensor.
const Use* use_of(const at::Tensor& parameter, OptionalUse ParameterUses::*kind) {
  const ParameterUses* const uses = uses_of(parameter);
  if (uses == nullptr || !(uses->*kind).has_value() || computes_derivative()) return nullptr;
  return &*(uses->*kind);
}

// What moves while this lives, the plan asks for, where `op` reads the parameter.
class MovedByStyle {
 public:
  explicit MovedByStyle(const c10::OperatorHandle& op)
      : operator_(op.schema().name()), cause_(CommCause::kStyle) {}

 private:
  CommOperatorScope operator_;
  CommCauseScope cause_;
};

// What a plan says of a sequence, inputs must have.
void check_dimension(const Placement& wanted, const at::Tensor& input,
                     const at::Tensor& parameter) {
  if (!wanted.is_shard()) return;
  const int64_t dim = wanted.shard_dim(), ndim = input.dim();
  TORCH_CHECK_VALUE(-ndim <= dim && dim < ndim, "the style of parameter '",
                    style_of(parameter)->path, "' cuts dimension ", dim,
                    " of its input, which is of shape ", input.sizes(), "; allowed are ", -ndim,
                    " to ", ndim - 1, " (rank ", spec_of(parameter).mesh().rank(), ")");
}

// Cast before it moves, if the parameter's operator is to compute in another dtype.
void place_input(const c10::OperatorHandle& op, c10::IValue& input, const Use& use,
                 const at::Tensor& parameter) {
  if (!use.input.has_value()) return;
  const MovedByStyle moved(op);
  const at::Tensor& tensor = input.toTensor();
  check_dimension(*use.input, tensor, parameter);
  input =
      placed_input(tensor, spec_of(parameter).mesh(), *use.input, dtype_beside(parameter, tensor));
}

at::Tensor placed_output(const c10::OperatorHandle& op, const at::Tensor& output, const Use& use) {
  if (!use.output.has_value() || !is_dtensor(output)) return output;
  const MovedByStyle moved(op);
  return placed_as(output, *use.output);
}

at::Tensor handed_out(const at::Tensor& output) {
  if (!is_dtensor(output) || !spec_of(output).placements()[0].is_replicate()) return output;
  return differentiable_to_local(output);
}

// What runs while this lives passes the parallel gate, and makes tensors that meet it.
struct BelowParallelGate {
  KeysOfNewDTensors parallel{DispatchKeySet(kParallelKey)};
  c10::impl::ExcludeDispatchKeyGuard excluded{kParallelKey};
};

// Runs the operator and gives its result where `use` wants it.
void run_styled(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack,
                const Use& use) {
  run_below_parallel_gate(op, keys, stack);
  const BelowParallelGate below;
  stack->back() = handed_out(placed_output(op, stack->back().toTensor(), use));
}

// The parameter's transpose, as its rows lie in memory: products of a backward read the
// parameter itself.
bool is_transposed(const at::Tensor& weight) {
  return weight.dim() == 2 && weight.stride(0) == 1 && weight.stride(1) == weight.size(0);
}

// Whether the ranks' products are terms of a sum, to which a bias is added once.
bool makes_terms(const Use& use) { return use.input.has_value() && use.input->is_shard(); }

// matmul(input, weight.t()) and mm
void product_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments = compared_arguments(op, *stack);
  const at::Tensor weight = tensor_at(arguments, 1);
  const Use* const use = use_of(weight, &ParameterUses::product);
  if (use == nullptr || !is_transposed(weight)) return parallel_gate_compared(op, keys, stack);
  place_input(op, arguments[0], *use, weight);
  run_styled(op, keys, stack, *use);
}

// The product `run`, then the bias.
template <class Run>
at::Tensor product_and_bias(const c10::OperatorHandle& op, const at::Tensor& bias, const Use& use,
                            const Run& run) {
  const BelowParallelGate below;
  return handed_out(at::add(placed_output(op, run(), use), bias));
}

// linear(input, weight, bias)
void linear_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments = compared_arguments(op, *stack);
  const at::Tensor weight = tensor_at(arguments, 1), bias = tensor_at(arguments, 2);
  const Use* const use = use_of(weight, &ParameterUses::product);
  if (use == nullptr) return parallel_gate_compared(op, keys, stack);
  place_input(op, arguments[0], *use, weight);
  if (!bias.defined() || !makes_terms(*use)) return run_styled(op, keys, stack, *use);
  const at::Tensor input = arguments[0].toTensor();
  torch::jit::drop(*stack, arguments.size());
  stack->emplace_back(
      product_and_bias(op, bias, *use, [&] { return at::linear(input, weight, /*bias=*/{}); }));
}

bool is_one(const c10::IValue& factor) { return factor.isScalar() && factor.toScalar().equal(1); }

// addmm(bias, input, weight.t(), beta, alpha)
void addmm_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments = compared_arguments(op, *stack);
  const at::Tensor bias = tensor_at(arguments, 0), weight = tensor_at(arguments, 2);
  const Use* const use = use_of(weight, &ParameterUses::product);
  if (use == nullptr || !is_transposed(weight)) return parallel_gate_compared(op, keys, stack);
  place_input(op, arguments[1], *use, weight);
  if (!makes_terms(*use) || !is_one(arguments[3]) || !is_one(arguments[4]))
    return run_styled(op, keys, stack, *use);
  const at::Tensor input = arguments[1].toTensor();
  torch::jit::drop(*stack, arguments.size());
  stack->emplace_back(product_and_bias(op, bias, *use, [&] { return at::mm(input, weight); }));
}

// Whether autograd records what is done with a parameter.
bool is_recorded(const at::Tensor& parameter) {
  if (auto* const storage = OnDemandStorage::behind(parameter))
    storage->synchronize_metadata(parameter.unsafeGetTensorImpl());
  return at::GradMode::is_enabled() && parameter.requires_grad();
}

// embedding(table, indices, padding_idx, scale_grad_by_freq, sparse) of a table whose
// rows are cut: its gradient is made of this rank's rows.
at::Tensor recorded_lookup(const GateArguments& arguments) {
  const at::Tensor table = tensor_at(arguments, 0);
  TouchedGroups groups;
  if (const auto* const storage = OnDemandStorage::behind(table)) groups.add(*storage);
  groups.fill();  // here: autograd's functions run without recording, which is another pass
  const BelowParallelGate below;
  const c10::impl::ExcludeDispatchKeyGuard touched(kGateKey);
  return look_up_rows(table, tensor_at(arguments, 1), arguments[2].toInt(), arguments[3].toBool());
}

void embedding_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const GateArguments arguments = compared_arguments(op, *stack);
  const at::Tensor table = tensor_at(arguments, 0);
  if (uses_of(table) == nullptr) return parallel_gate_compared(op, keys, stack);
  const Use* const use = use_of(table, &ParameterUses::lookup);
  const Use kept = use == nullptr ? Use{} : *use;
  const bool is_sparse = arguments[4].toBool();
  if (is_sparse || !has_cut_rows(table, tensor_at(arguments, 1)) || !is_recorded(table))
    return use == nullptr ? parallel_gate_compared(op, keys, stack)
                          : run_styled(op, keys, stack, kept);
  const at::Tensor rows = recorded_lookup(arguments);
  torch::jit::drop(*stack, arguments.size());
  const BelowParallelGate below;
  stack->emplace_back(handed_out(placed_output(op, rows, kept)));
}

// add_(self, other, alpha), by which autograd accumulates gradients.
void add_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments(op, *stack);
  if (!is_accumulated_at_home(arguments[0].toTensor(), arguments[1].toTensor()))
    return parallel_gate(op, keys, stack);
  torch::jit::drop(*stack, arguments.size() - 1);
}

// layer_norm and rms_norm(input, shape, weight)
void norm_gate(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  GateArguments arguments = compared_arguments(op, *stack);
  const at::Tensor weight = tensor_at(arguments, 2);
  const Use* const use = use_of(weight, &ParameterUses::norm);
  if (use != nullptr) place_input(op, arguments[0], *use, weight);
  parallel_gate_compared(op, keys, stack);
}

}  // namespace

void register_styled_operators(std::vector<c10::RegistrationHandleRAII>& handles) {
  using Kernel = c10::KernelFunction;
  const auto add = [&](const char* name, Kernel kernel, const char* overload = "") {
    handles.push_back(c10::Dispatcher::singleton().registerImpl({name, overload}, kParallelKey,
                                                                std::move(kernel), std::nullopt,
                                                                nullptr, "fsdp tensor parallel"));
  };
  add("aten::linear", Kernel::makeFromBoxedFunction<&linear_gate>());
  add("aten::matmul", Kernel::makeFromBoxedFunction<&product_gate>());
  add("aten::mm", Kernel::makeFromBoxedFunction<&product_gate>());
  add("aten::addmm", Kernel::makeFromBoxedFunction<&addmm_gate>());
  add("aten::embedding", Kernel::makeFromBoxedFunction<&embedding_gate>());
  add("aten::add_", Kernel::makeFromBoxedFunction<&add_gate>(), "Tensor");
  add("aten::layer_norm", Kernel::makeFromBoxedFunction<&norm_gate>());
  add("aten::rms_norm", Kernel::makeFromBoxedFunction<&norm_gate>());
}

}  // namespace fsdp::internal
