#include "tensor_parallel/internal/parallel_gate.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/common_mesh.h"
#include "tensor_parallel/internal/first_inputs.h"
#include "tensor_parallel/internal/parallel_member.h"
#include "tensor_parallel/internal/placed_input.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace fsdp::internal {
namespace {

// set_data(self, from) where `self` is a member.
void check_takes(const at::Tensor& self, const at::Tensor& from) {
  const DTensorSpec& own = spec_of(self);
  const std::string& path = style_of(self)->path;
  if (owner_of(self) != nullptr) owner_of(self)->before_set_data(self, from);
  TORCH_CHECK_VALUE(is_dtensor(from), "set_data on tensor-parallel parameter '", path, "' of ",
                    to_string(own), " with a plain tensor of shape ", from.sizes(),
                    ": write a plain tensor of the global shape with copy_(), which takes this "
                    "rank's part (rank ",
                    own.mesh().rank(), ")");
  const DTensorSpec& other = spec_of(from);
  const bool lies_alike = other.mesh() == own.mesh() && other.shape() == own.shape() &&
                          other.placements() == own.placements();
  const bool meets_styles = from.unsafeGetTensorImpl()->key_set().has(kParallelKey);
  TORCH_CHECK_VALUE(lies_alike && meets_styles, "set_data on tensor-parallel parameter '", path,
                    "' of ", to_string(own), " with a DTensor of ", to_string(other),
                    ": it must lie alike, and be computed from parameters; write it with copy_() "
                    "(rank ",
                    own.mesh().rank(), ")");
}

bool compatible_at_parallel_gate(c10::DispatchKeySet keys, const at::Tensor& self,
                                 const at::Tensor& from) {
  using Compatible = bool(const at::Tensor&, const at::Tensor&);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::_has_compatible_shallow_copy_type", "")
                             .typed<Compatible>();
  TORCH_CHECK_VALUE(is_dtensor(self) || !is_dtensor(from), "set_data on a plain tensor of shape ",
                    self.sizes(),
                    " from a tensor-parallel one (Module::clone?): it would be a DTensor without "
                    "a style. Build a new module, apply parallelize_module to it and copy the "
                    "parameters");
  if (style_of(self) != nullptr && !meets_gate(self) && !self.is_same(from)) {
    check_takes(self, from);
    set_style(from, meta_of(self).style);
  }
  return op.redispatch(keys_below(kParallelKey, keys), self, from);
}

// Tensor::set_data on a tensor-parallel parameter. It replaces a tensor's data behind the
// dispatcher's back, but asks _has_compatible_shallow_copy_type first, which is
// registered here, under the parallel gate's key. A parameter takes DTensors that lie as
// it does (Module::to(dtype)), and keeps its style. Plain tensors, other DTensors, and
// plain tensors that are to become one (Module::clone) are a ValueError. Appends the
// registrations.
void register_parallel_set_data(std::vector<c10::RegistrationHandleRAII>& handles) {
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      {"aten::_has_compatible_shallow_copy_type", ""}, kParallelKey,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&compatible_at_parallel_gate),
      std::nullopt, nullptr, "fsdp tensor parallel"));
}

// Element i of one list meets element i of the others only, and optimizers, which use
// them, record no graph.
bool is_per_element(const GateArguments& arguments) {
  const std::string_view name = arguments.schema().name();
  return name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_");
}

bool writes_plain(const GateArguments& arguments) {
  bool found = false;
  arguments.for_each(
      [&](const at::Tensor& tensor, bool writes) { found |= writes && !is_dtensor(tensor); });
  return found;
}

at::Tensor whole(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return {};
  const CommCauseScope cause(CommCause::kBoundary);
  const auto everywhere = spec_of(tensor).replicated().placements();
  return differentiable_to_local(differentiable_redistribute(tensor, everywhere));
}

// Makes parameters among the arguments readable.
std::unique_ptr<TouchedGroups> touched(const GateArguments& arguments) {
  auto groups = std::make_unique<TouchedGroups>();
  arguments.for_each([&groups](const at::Tensor& tensor, bool) {
    if (const auto* const storage = OnDemandStorage::behind(tensor)) groups->add(*storage);
  });
  groups->fill();
  return groups;
}

std::optional<DeviceMesh> mesh_among(const GateArguments& arguments) {
  std::optional<DeviceMesh> mesh;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    if (!mesh.has_value() && meets_parallel_gate(tensor)) mesh = spec_of(tensor).mesh();
  });
  return mesh;
}

// Puts the part of this rank in the place of experts (ExpertParallel) beside plain
// tensors.
bool take_own_parts(GateArguments& arguments) {
  bool has_own = false, has_plain = false, writes_some = false;
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    writes_some |= writes && is_dtensor(tensor);
    const auto* const uses = uses_of(tensor);
    has_own |= uses != nullptr && uses->is_own;
    has_plain |= !is_dtensor(tensor) && tensor.dim() > 0;
  });
  if (!has_own || !has_plain || writes_some) return false;
  return arguments.replace_each([](const at::Tensor& tensor) {
    const auto* const uses = uses_of(tensor);
    if (uses == nullptr || !uses->is_own) return at::Tensor();
    static_cast<void>(is_recorded_member(tensor));  // its entry may have been frozen since
    return at::Tensor(DTensor(tensor).to_local());
  });
}

bool has_recorded_plain(const GateArguments& arguments) {
  bool found = false;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    if (is_dtensor(tensor)) return;
    if (auto* const storage = OnDemandStorage::behind(tensor))
      storage->synchronize_metadata(tensor.unsafeGetTensorImpl());
    found |= tensor.requires_grad();
  });
  return found;
}

void place_recorded_plain(GateArguments& arguments) {
  if (!at::GradMode::is_enabled() || !has_recorded_plain(arguments)) return;
  const auto mesh = mesh_among(arguments);
  if (!mesh.has_value()) return;
  arguments.replace_each([&](const at::Tensor& tensor) {
    if (is_dtensor(tensor) || !tensor.requires_grad()) return at::Tensor();
    // Beside a batch the gate of on-demand memory sees to members.
    if (mesh->ndim() > 1 && is_recorded_member(tensor)) return at::Tensor();
    return placed_input(tensor, *mesh, Replicate{});
  });
}

// Operators of layers that have no style, which are given a batch. What others are given
// beside parameters is not compared: what a rank looks at by itself is no collective.
bool is_of_a_layer(std::string_view name) {
  for (const std::string_view layer :
       {"aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution", "aten::bmm",
        "aten::baddbmm", "aten::einsum", "aten::embedding_bag", "aten::gru", "aten::lstm",
        "aten::rnn_tanh", "aten::rnn_relu", "aten::batch_norm", "aten::group_norm"}) {
    if (name == layer) return true;
  }
  return false;
}

}  // namespace

void run_below_parallel_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  const KeysOfNewDTensors parallel{c10::DispatchKeySet(kParallelKey)};
  std::optional<c10::impl::ExcludeDispatchKeyGuard> excluded;
  // What is no operator of LibTorch may have a body that mixes tensors anew.
  if (std::string_view(op.schema().name()).starts_with("aten::")) excluded.emplace(kParallelKey);
  op.redispatchBoxed(keys_below(kParallelKey, keys), stack);
}

bool computes_derivative() {
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && node->is_traceable();
}

void parallel_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  if (FirstSteps::any()) {
    const auto compares =
        is_of_a_layer(op.schema().name()) ? compare_first_inputs : compare_beside_activations;
    compares(op, GateArguments(op, *stack));
  }
  parallel_gate_compared(op, keys, stack);
}

void parallel_gate_compared(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            torch::jit::Stack* stack) {
  forget_input_without_source();
  GateArguments arguments(op, *stack);
  if (!is_per_element(arguments)) {
    if (substitute_entries(arguments) || take_own_parts(arguments)) return op.callBoxed(stack);
    if (writes_plain(arguments)) {
      const auto parameters = touched(arguments);
      arguments.replace_each(whole);
      return op.callBoxed(stack);
    }
    if (bring_to_common_mesh(arguments)) return op.callBoxed(stack);
    place_recorded_plain(arguments);
  }
  run_below_parallel_gate(op, keys, stack);
}

void install_parallel_gate() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: kernels stay for the life of the process.
    static auto& handles = *new std::vector<c10::RegistrationHandleRAII>();
    register_styled_operators(handles);
    register_parallel_set_data(handles);
    handles.push_back(c10::Dispatcher::singleton().registerFallback(
        kParallelKey, c10::KernelFunction::makeFromBoxedFunction<&parallel_gate>(),
        "fsdp tensor parallel"));
  });
}

}  // namespace fsdp::internal
