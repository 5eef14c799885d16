// Where styles act: at the operator that reads the parameter, so that no module needs to
// know of it.
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/common_mesh.h"
#include "tensor_parallel/internal/first_inputs.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parallel_member.h"
#include "tensor_parallel/internal/placed_input.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor tensor_at(const GateArguments& arguments, size_t index) {
  return arguments[index].isTensor() ? arguments[index].toTensor() : at::Tensor();
}

// With members on the mesh of a batch, too. Collective in a model's first steps.
GateArguments compared_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  GateArguments arguments(op, stack);
  if (FirstSteps::any()) compare_first_inputs(op, arguments);
  bring_members_to_common_mesh(arguments);
  return arguments;
}

// Null where no style acts. None does in derivatives: the products of second ones look
// like those of a forward, and what autograd adds up must be of one kind, plain or a
// DTensor.
const Use* use_of(const at::Tensor& parameter, std::optional<Use> ParameterUses::*kind) {
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

// REQUIRES: below the parallel gate.
at::Tensor placed_output(const c10::OperatorHandle& op, const at::Tensor& output, const Use& use) {
  if (!use.output.has_value() || !is_dtensor(output)) return output;
  const MovedByStyle moved(op);
  return placed_as(output, *use.output);
}

at::Tensor handed_out(const at::Tensor& output) {
  if (!is_dtensor(output) || !spec_of(output).placements().back().is_replicate()) return output;
  const bool has_batch = spec_of(output).mesh().ndim() > 1;
  return has_batch ? on_mesh_of_batch(output) : differentiable_to_local(output);
}

// What runs while this lives passes the parallel gate, and makes tensors that meet it.
struct BelowParallelGate {
  KeysOfNewDTensors parallel{DispatchKeySet(kParallelKey)};
  c10::impl::ExcludeDispatchKeyGuard excluded{kParallelKey};
};

// What `run` gives below the parallel gate, handed out above it.
template <class Run>
at::Tensor handed_out_of(const Run& run) {
  at::Tensor output;
  {
    const BelowParallelGate below;
    output = run();
  }
  return handed_out(output);
}

// Runs the operator and gives its result where `use` wants it.
void run_styled(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack,
                const Use& use) {
  GateArguments arguments(op, *stack);
  bring_to_common_mesh(arguments);
  run_below_parallel_gate(op, keys, stack);
  stack->back() = handed_out_of([&] { return placed_output(op, stack->back().toTensor(), use); });
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
  return handed_out_of([&] { return at::add(placed_output(op, run(), use), bias); });
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

// Looking up rows of a table of which each rank has some, as of a vocabulary. The result
// is terms, as embedding's is; its gradient is added up for this rank's rows only, where
// autograd's formula makes one of the whole table.
struct Lookup final : torch::CustomClassHolder {
  Lookup(DTensorSpec of, at::Tensor at, int64_t padding, bool scale)
      : table(std::move(of)), indices(std::move(at)), padding_idx(padding), scales_by_freq(scale) {}

  DTensorSpec table;
  at::Tensor indices;  // plain
  int64_t padding_idx;
  bool scales_by_freq;
};
using LookupPtr = c10::intrusive_ptr<Lookup>;

void save(AutogradContext* context, const LookupPtr& lookup) {
  context->saved_data["lookup"] = c10::IValue::make_capsule(lookup);
}
LookupPtr saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Lookup>(context->saved_data["lookup"].toCapsule());
}

// Of every index, on this rank.
at::Tensor whole_gradient(const at::Tensor& grad) {
  if (!is_dtensor(grad)) return grad;
  const CommCauseScope cause(CommCause::kGradient);
  return whole_value(grad);
}

// This rank's rows; one row more is for the indices of others, and is not added up.
at::Tensor gradient_of_own_rows(const at::Tensor& grad, const Lookup& lookup) {
  const int64_t rows = lookup.table.local_shape()[0];
  const auto cut = cut_indices(lookup.indices, lookup.table, /*dim=*/0);
  const at::Tensor is_out = cut.is_elsewhere.logical_or(lookup.indices.eq(lookup.padding_idx));
  return at::embedding_dense_backward(grad, cut.in_part.masked_fill(is_out, rows), rows + 1,
                                      /*padding_idx=*/rows, lookup.scales_by_freq)
      .narrow(0, 0, rows)
      .contiguous();
}

at::Tensor look_up(const at::Tensor& table, const LookupPtr& lookup);
at::Tensor gradient_of_table(const at::Tensor& grad, const LookupPtr& lookup);

class LookUp : public torch::autograd::Function<LookUp> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const LookupPtr& lookup) {
    save(context, lookup);
    return at::embedding(table, lookup->indices, lookup->padding_idx, lookup->scales_by_freq);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {gradient_of_table(grads[0], saved(context)), at::Tensor()};
  }
};

class GradientOfTable : public torch::autograd::Function<GradientOfTable> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& grad,
                            const LookupPtr& lookup) {
    save(context, lookup);
    const at::Tensor own = gradient_of_own_rows(whole_gradient(grad), *lookup);
    const DTensorSpec& table = lookup->table;
    return make_dtensor(own, table.with_shape(table.shape()));
  }
  // What a change of the result's gradient changes in that of the table; padding has
  // none.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto lookup = saved(context);
    const at::Tensor rows = look_up(grads[0], lookup);
    const at::Tensor is_padding = lookup->indices.eq(lookup->padding_idx).unsqueeze(-1);
    return {rows.masked_fill(is_padding, 0), at::Tensor()};
  }
};

bool records(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

at::Tensor look_up(const at::Tensor& table, const LookupPtr& lookup) {
  if (records(table)) return LookUp::apply(table, lookup);
  return at::embedding(table, lookup->indices, lookup->padding_idx, lookup->scales_by_freq);
}

at::Tensor gradient_of_table(const at::Tensor& grad, const LookupPtr& lookup) {
  return GradientOfTable::apply(grad, lookup);
}

// Whether `table` is a DTensor of one mesh dimension that cuts its rows, and `indices`
// are the same on all ranks.
bool has_cut_rows(const at::Tensor& table, const at::Tensor& indices) {
  if (!is_dtensor(table) || is_dtensor(indices)) return false;
  const DTensorSpec& spec = spec_of(table);
  return spec.mesh().ndim() == 1 && spec.is_cut(0);
}

// embedding(table, indices, padding_idx, scale_grad_by_freq). Differentiable twice.
// REQUIRES: has_cut_rows(). Its backward is collective over the mesh where the gradient
// that arrives is cut or terms.
at::Tensor look_up_rows(const at::Tensor& table, const at::Tensor& indices, int64_t padding_idx,
                        bool scale_grad_by_freq) {
  return look_up(
      table, c10::make_intrusive<Lookup>(spec_of(table), indices, padding_idx, scale_grad_by_freq));
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
  stack->emplace_back(handed_out_of([&] { return placed_output(op, rows, kept); }));
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
