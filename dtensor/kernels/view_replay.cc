// Views of DTensors under autograd. What is written in place through a view, autograd
// undoes in backward by taking the same view of the base's gradient: with as_strided(),
// unless the view was made with view replay on (c10::AutogradState). DTensors have no
// memory to stride over, so view operators that meet one run with replay on. Plain
// tensors are left as they are.
#include "dtensor/dtensor.h"
#include "dtensor/kernels/dispatch.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/expand_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <c10/core/AutogradState.h>

#include <string_view>
#include <utility>

namespace fsdp::internal {
namespace {

// Threads with generators of their own bring plain tensors here, too.
class ReplayingViews {
 public:
  explicit ReplayingViews(const at::Tensor& self)
      : state_(c10::AutogradState::get_tls_state()), before_(state_.get_view_replay_enabled()) {
    if (is_dtensor(self)) state_.set_view_replay_enabled(true);
  }
  ~ReplayingViews() { state_.set_view_replay_enabled(before_); }
  ReplayingViews(const ReplayingViews&) = delete;
  ReplayingViews& operator=(const ReplayingViews&) = delete;

 private:
  c10::AutogradState& state_;  // this thread's
  bool before_;
};

// Views are of their first argument.
void replayed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const ReplayingViews replaying((&*stack->end() - op.schema().arguments().size())->toTensor());
  op.redispatchBoxed(keys_below(kFirstKey, keys), stack);
}

// The views that models take most, without boxed arguments.
template <class Op, class Schema = typename Op::schema>
struct Replayed;
template <class Op, class Result, class... Args>
struct Replayed<Op, Result(const at::Tensor&, Args...)> {
  static Result call(c10::DispatchKeySet keys, const at::Tensor& self, Args... args) {
    const ReplayingViews replaying(self);
    return Op::redispatch(keys_below(kFirstKey, keys), self, std::forward<Args>(args)...);
  }
};

template <class... Ops>
struct FrequentViews {
  static void register_all(KernelHandles& handles) {
    (handles.push_back(c10::Dispatcher::singleton().registerImpl(
         {Ops::name, Ops::overload_name}, kFirstKey,
         c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(&Replayed<Ops>::call)), std::nullopt,
         nullptr, "fsdp DTensor views")),
     ...);
  }
  static bool contain(const c10::OperatorName& name) {
    return ((name == c10::OperatorName(Ops::name, Ops::overload_name)) || ...);
  }
};

namespace ops = at::_ops;
using Frequent = FrequentViews<ops::view, ops::transpose_int, ops::t, ops::permute, ops::select_int,
                               ops::slice_Tensor, ops::unsqueeze, ops::expand, ops::split_Tensor,
                               ops::split_with_sizes, ops::unbind_int>;

// detach() gives what autograd does not see.
bool is_recorded_view(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  const auto* const alias = returns.empty() ? nullptr : returns[0].alias_info();
  return alias != nullptr && !alias->isWrite() && op.schema().name() != "aten::detach" &&
         std::string_view(op.schema().name()).starts_with("aten::") &&
         op.schema().arguments()[0].type()->kind() == c10::TypeKind::TensorType &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

void register_view_replay(KernelHandles& handles) {
  auto& dispatcher = c10::Dispatcher::singleton();
  Frequent::register_all(handles);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || Frequent::contain(name) || !is_recorded_view(*op)) continue;
    handles.push_back(dispatcher.registerImpl(
        name, kFirstKey, c10::KernelFunction::makeFromBoxedFunction<&replayed>(), std::nullopt,
        nullptr, "fsdp DTensor views"));
  }
}

}  // namespace fsdp::internal
