// Unboxed kernels for the elementwise operators that optimizers call once per parameter
// and step. Where all DTensors lie alike they run on the local tensors without a boxed
// argument; any other call goes to the boxed kernel. What they compute and whom they tell
// is what that does (dispatch.h, dtensor/ops/pointwise.cc).
#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dispatch/scalar_arguments.h"
#include "dtensor/kernels/dispatch.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/same_placements.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>

#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace fsdp::internal {
namespace {

// Past the dispatcher, where other modes of the caller's would meet it: it outlives them.
at::Tensor empty_number() {
  const c10::InferenceMode usual(false);
  return at::Tensor(at::detail::empty_cpu({}, at::kFloat));
}

// A C++ number as elementwise kernels take it: a tensor without dimensions, of the dtype
// that they compute in. LibTorch makes one of double, and then a converted one, which
// costs more than the rest of a small operator; an optimizer does so five times per
// parameter and step.
//
// `number` converted as LibTorch would beside `operand`, with the same bits. Null where
// that is left to LibTorch: beside anything but float tensors on the CPU, and for complex
// numbers. It is this thread's, and has the value until the next call.
const at::Tensor* number_operand(const at::Tensor& operand, const at::Scalar& number) {
  if (!operand.is_cpu() || operand.scalar_type() != at::kFloat) return nullptr;
  if (number.isSymbolic()) return nullptr;
  const bool is_whole = number.isIntegral(/*includeBool=*/true);
  if (!is_whole && !number.isFloatingPoint()) return nullptr;
  static thread_local const at::Tensor kept = empty_number();
  *static_cast<float*>(kept.unsafeGetTensorImpl()->mutable_data()) =
      is_whole ? static_cast<float>(number.toLong()) : static_cast<float>(number.toDouble());
  return &kept;
}

template <class Argument>
constexpr bool kIsTensor = std::is_same_v<std::decay_t<Argument>, at::Tensor>;

// An argument as the local operator takes it. DTensors keep their locals alive.
template <class Argument>
const Argument& local_argument(const Argument& argument) {
  if constexpr (kIsTensor<Argument>) {
    const auto* const meta = find_meta(argument);
    return meta == nullptr ? argument : meta->local;
  } else {
    return argument;
  }
}

template <class Argument>
void look_at(const Argument& argument, SamePlacements& operands) {
  if constexpr (kIsTensor<Argument>) operands.look(argument);
}

template <class Argument>
void meet(const Argument& argument, ScalarArguments& met) {
  if constexpr (kIsTensor<Argument>) {
    met.meet(argument);
  } else {
    met.add(argument);
  }
}

template <class... Args>
ScalarHash numbers_of(const char* op, const Args&... args) {
  ScalarArguments met;
  (meet(args, met), ...);
  return met.of(op);
}

template <class Argument>
void tell_read_of(const Argument& argument) {
  if constexpr (kIsTensor<Argument>) tell_read(argument);
}

template <class Op, class Result, class... Args>
Result by_strategy(c10::DispatchKeySet keys, Args... args) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  static const auto kernel = *kernel_of(op);
  return kernel.template call<Result, Args...>(op, keys, std::forward<Args>(args)...);
}

void set_origin(const at::Tensor& dtensor, const ScalarHash& scalars) {
  set_from_parameter(dtensor);
  set_scalar_hash(dtensor, scalars);
}

// The operator that takes a tensor in the place of a number, as its second operand.
template <class Op>
struct OfTensors;
template <>
struct OfTensors<at::_ops::add__Scalar> : at::_ops::add__Tensor {};
template <>
struct OfTensors<at::_ops::mul_Scalar> : at::_ops::mul_Tensor {};
template <>
struct OfTensors<at::_ops::mul__Scalar> : at::_ops::mul__Tensor {};
template <>
struct OfTensors<at::_ops::div_Scalar> : at::_ops::div_Tensor {};
template <>
struct OfTensors<at::_ops::div__Scalar> : at::_ops::div__Tensor {};

template <class Op>
concept TakesNumber = requires {
  &OfTensors<Op>::call;
};

template <class Op, class Self, class... Args>
decltype(auto) run_on_locals(Self& self, const Args&... args) {
  return Op::call(self, args...);
}

template <TakesNumber Op, class Self, class... Args>
decltype(auto) run_on_locals(Self& self, const at::Scalar& number, const Args&... args) {
  if (const at::Tensor* const operand = number_operand(self, number))
    return OfTensors<Op>::call(self, *operand, args...);
  return Op::call(self, number, args...);
}

template <class Op, class Schema = typename Op::schema>
struct FastPointwise;

// Makes a new tensor.
template <class Op, class... Args>
struct FastPointwise<Op, at::Tensor(Args...)> {
  static at::Tensor call(c10::DispatchKeySet keys, Args... args) {
    SamePlacements operands;
    (look_at(args, operands), ...);
    if (!operands.alike() || !operands.is_dense() || operands.has_own_number() || compares_plain())
      return by_strategy<Op, at::Tensor, Args...>(keys, std::forward<Args>(args)...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    (tell_read_of(args), ...);
    at::Tensor result = make_dtensor(run_on_locals<Op>(local_argument(args)...), operands.spec());
    if (operands.from_parameter()) set_origin(result, numbers_of(Op::name, args...));
    return result;
  }
};

// Writes its first operand.
template <class Op, class... Args>
struct FastPointwise<Op, at::Tensor&(at::Tensor&, Args...)> {
  static at::Tensor& call(c10::DispatchKeySet keys, at::Tensor& self, Args... args) {
    SamePlacements operands;
    operands.look(self);
    (look_at(args, operands), ...);
    const DTensorMeta* const meta = find_meta(self);  // its owner may give it another below
    const bool is_of_parameter = meta != nullptr && meta->is_of_parameter();
    if (meta == nullptr || !operands.alike() || compares_plain() ||
        (operands.has_own_number() && (!operands.spec().has_shard() || is_of_parameter)))
      return by_strategy<Op, at::Tensor&, at::Tensor&, Args...>(keys, self,
                                                                std::forward<Args>(args)...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    tell_write(self);
    (tell_read_of(args), ...);
    // A parameter has the mark, and keeps no numbers.
    if (operands.from_parameter() && !is_of_parameter)
      set_origin(self, numbers_of(Op::name, self, args...));
    at::Tensor local = local_of(self);
    run_on_locals<Op>(local, local_argument(args)...);
    tell_written(self);
    return self;
  }
};

template <class... Ops>
struct Operators {
  static void register_all(KernelHandles& handles) {
    (handles.push_back(c10::Dispatcher::singleton().registerImpl(
         {Ops::name, Ops::overload_name}, kDTensorKey,
         c10::KernelFunction::makeFromUnboxedRuntimeFunction(&FastPointwise<Ops>::call),
         std::nullopt, nullptr, "fsdp DTensor")),
     ...);
  }
  static bool are(const std::set<std::string>& names) {
    constexpr size_t kNamespace = std::string_view("aten::").size();
    return names == std::set<std::string>{std::string(Ops::name).substr(kNamespace) + "." +
                                          Ops::overload_name...};
  }
};

namespace ops = at::_ops;
using Fast = Operators<ops::add_Tensor, ops::add__Tensor, ops::add__Scalar, ops::sub__Tensor,
                       ops::mul_Tensor, ops::mul_Scalar, ops::mul__Tensor, ops::mul__Scalar,
                       ops::div_Tensor, ops::div_Scalar, ops::div__Tensor, ops::div__Scalar,
                       ops::addcmul_, ops::addcdiv_, ops::lerp__Scalar, ops::sqrt>;

}  // namespace

void register_fast_pointwise(KernelHandles& handles) {
  TORCH_INTERNAL_ASSERT(Fast::are(op_table().unboxed()));
  Fast::register_all(handles);
}

}  // namespace fsdp::internal
