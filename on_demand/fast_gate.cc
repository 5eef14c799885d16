#include "dtensor/dtensor.h"
#include "on_demand/gate.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/IListRef.h>
#include <ATen/ops/_fused_rms_norm_backward_ops.h>
#include <ATen/ops/_fused_rms_norm_ops.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/chunk_ops.h>
#include <ATen/ops/conv1d_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/dropout_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/group_norm_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/log_softmax_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/narrow_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rms_norm_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/softmax_ops.h>
#include <ATen/ops/softplus_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/stack_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/topk_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using c10::DispatchKeySet;

// Applies `visit` to an argument if it is a defined tensor, or to those of a list.
template <class Visit>
void visit_tensor(const at::Tensor& tensor, const Visit& visit) {
  if (tensor.defined()) visit(tensor);
}
template <class Visit>
void visit_tensor(const std::optional<at::Tensor>& tensor, const Visit& visit) {
  if (tensor.has_value()) visit_tensor(*tensor, visit);
}
template <class Visit>
void visit_tensor(const at::TensorList& tensors, const Visit& visit) {
  for (const at::Tensor& tensor : tensors) visit_tensor(tensor, visit);
}
template <class Visit>
void visit_tensor(const at::ITensorListRef& tensors, const Visit& visit) {
  for (const at::Tensor& tensor : tensors) visit_tensor(tensor, visit);
}
template <class Argument, class Visit>
void visit_tensor(const Argument&, const Visit&) {}

// Whether the boxed kernel is to cast arguments.
template <class... Args>
bool any_to_cast(const ComputeDtype& dtype, const Args&... args) {
  bool found = false;
  const auto look = [&](const at::Tensor& tensor) { found |= dtype.is_to_cast(tensor); };
  (visit_tensor(args, look), ...);
  return found;
}

template <class... Args>
bool any_entry(const Args&... args) {
  bool found = false;
  const auto look = [&found](const at::Tensor& tensor) { found |= is_entry_or_view(tensor); };
  (visit_tensor(args, look), ...);
  return found;
}

OnDemandStorage* up_to_date_storage(const at::Tensor& tensor) {
  if (!meets_gate(tensor)) return nullptr;
  auto* const storage = OnDemandStorage::behind(tensor);
  if (storage != nullptr) storage->synchronize_metadata(tensor.unsafeGetTensorImpl());
  return storage;
}

// c10::impl::ExcludeDispatchKeyGuard of the gate's key, inline.
class ExcludeGate {
 public:
  ExcludeGate() : local_(c10::impl::raw_local_dispatch_key_set), before_(local_.excluded()) {
    local_.set_excluded(before_.add(kGateKey));
  }
  ExcludeGate(const ExcludeGate&) = delete;
  ExcludeGate& operator=(const ExcludeGate&) = delete;
  ~ExcludeGate() { local_.set_excluded(before_); }

 private:
  c10::impl::PODLocalDispatchKeySet& local_;
  DispatchKeySet before_;
};

bool is_update_among_dtensors(const at::Tensor& self, const auto&... others) {
  bool all_dtensors = is_entry_or_view(self);
  const auto look = [&all_dtensors](const at::Tensor& tensor) {
    all_dtensors &= is_dtensor(tensor);
  };
  (visit_tensor(others, look), ...);
  return all_dtensors;
}

// Kernels of the operator at::_ops::Op. Registry entries among the arguments are left to
// the boxed kernels, but for updates: what optimizers write to entries.
template <class Op, class Schema = typename Op::schema>
struct FastGate;

template <class Op, class Result, class... Args>
struct FastGate<Op, Result(Args...)> {
  using Schema = Result(Args...);

  static Result touching(DispatchKeySet keys, Args... args) {
    if (any_entry(args...)) return boxed<&touching_gate>(keys, std::forward<Args>(args)...);
    TouchedGroups groups;
    ComputeDtype dtype;
    bool any_deferred = false, any_member = false, any_dtensor = false;
    const auto add = [&](const at::Tensor& tensor) {
      const auto* storage = up_to_date_storage(tensor);
      const bool is_distributed = find_meta(tensor) != nullptr;
      any_dtensor |= is_distributed;
      if (storage == nullptr) {
        any_deferred |= meets_gate(tensor);
        return;
      }
      any_member |= !is_distributed;
      groups.add(*storage);
      dtype.meet(*storage, tensor);
    };
    (visit_tensor(args, add), ...);
    if (any_deferred || (dtype.is_asked_for() && any_to_cast(dtype, args...)) ||
        may_replicate_members(any_member, any_dtensor))
      return boxed<&touching_gate>(keys, std::forward<Args>(args)...);
    groups.fill();
    return run_below(keys, args...);
  }

  static Result aliasing(DispatchKeySet keys, Args... args) {
    if (any_entry(args...)) return boxed<&aliasing_gate>(keys, std::forward<Args>(args)...);
    TouchedGroups groups;
    const auto add = [&groups](const at::Tensor& tensor) {
      const auto* const storage = up_to_date_storage(tensor);
      if (storage != nullptr && may_read_to_alias(tensor)) groups.add(*storage);
    };
    (visit_tensor(args, add), ...);
    groups.fill();
    return run_below(keys, args...);
  }

  // In-place operators. One that writes an entry keeps its entries; if all operands are
  // DTensors, no member is used.
  static Result updating(DispatchKeySet keys, Args... args) {
    if (is_update_among_dtensors(args...)) return run_below(keys, args...);
    return boxed<&touching_gate>(keys, std::forward<Args>(args)...);
  }

 private:
  // Arguments that are values (SymInts, options) are moved on their way, so the operator
  // is called through its handle: Op::redispatch would be one more call that moves them.
  static Result run_below(DispatchKeySet keys, Args&... args) {
    static const auto op = handle().template typed<Schema>();
    const ExcludeGate excluded;
    return op.redispatch(below_gate(keys), std::forward<Args>(args)...);
  }

  static c10::OperatorHandle handle() {
    return c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  }

  template <c10::KernelFunction::BoxedKernelFunction_withDispatchKeys* kernel>
  static Result boxed(DispatchKeySet keys, Args... args) {
    static const auto function = c10::KernelFunction::makeFromBoxedFunction<kernel>();
    static const auto op = handle();
    return function.template call<Result, Args...>(op, keys, std::forward<Args>(args)...);
  }
};

class Registrar {
 public:
  explicit Registrar(std::vector<c10::RegistrationHandleRAII>& handles) : handles_(handles) {}

  template <class... Ops>
  void touching() {
    (add<Ops>(TORCH_FN(FastGate<Ops>::touching)), ...);
  }
  template <class... Ops>
  void aliasing() {
    (add<Ops>(TORCH_FN(FastGate<Ops>::aliasing)), ...);
  }
  template <class... Ops>
  void updating() {
    (add<Ops>(TORCH_FN(FastGate<Ops>::updating)), ...);
  }

 private:
  template <class Op, class Kernel>
  void add(Kernel kernel) {
    handles_.push_back(c10::Dispatcher::singleton().registerImpl(
        {Op::name, Op::overload_name}, kGateKey,
        c10::KernelFunction::makeFromUnboxedFunction(kernel), std::nullopt, nullptr, "fsdp"));
  }

  std::vector<c10::RegistrationHandleRAII>& handles_;
};

}  // namespace

void register_fast_gates(std::vector<c10::RegistrationHandleRAII>& handles) {
  namespace ops = at::_ops;
  Registrar registrar(handles);
  registrar.touching<ops::linear, ops::matmul, ops::mm, ops::addmm, ops::bmm, ops::mul_Tensor,
                     ops::add_Tensor, ops::embedding, ops::scaled_dot_product_attention>();
  registrar.touching<ops::layer_norm, ops::native_layer_norm_backward, ops::rms_norm,
                     ops::_fused_rms_norm, ops::_fused_rms_norm_backward, ops::group_norm,
                     ops::batch_norm>();
  registrar.touching<ops::conv1d, ops::conv2d, ops::convolution, ops::convolution_backward>();
  registrar.touching<ops::sub_Tensor, ops::div_Tensor, ops::mul_Scalar, ops::exp, ops::sigmoid,
                     ops::tanh, ops::relu, ops::gelu, ops::silu, ops::softplus, ops::dropout>();
  registrar.touching<ops::softmax_int, ops::log_softmax_int, ops::cross_entropy_loss,
                     ops::where_self, ops::topk, ops::cat, ops::stack>();
  registrar.aliasing<ops::t, ops::transpose_int, ops::permute, ops::view, ops::_unsafe_view,
                     ops::_reshape_alias, ops::as_strided, ops::expand, ops::unsqueeze,
                     ops::squeeze, ops::squeeze_dim>();
  registrar.aliasing<ops::slice_Tensor, ops::select_int, ops::narrow, ops::split_Tensor,
                     ops::split_with_sizes, ops::chunk, ops::unbind_int>();
  registrar.updating<ops::add__Tensor, ops::mul__Scalar, ops::addcdiv_>();
}

}  // namespace fsdp::internal
