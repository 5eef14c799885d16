// The scalar arguments of an operator, as the hash that its results carry
// (scalar_hash.h): C++ numbers, and what was mixed into its DTensor operands before.
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/tensor_arguments.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/scalar_hash.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <bit>
#include <cstdint>

namespace fsdp::internal {

class ScalarArguments {
 public:
  // A tensor of either kind, or none.
  void meet(const at::Tensor& operand) {
    if (const auto* const meta = find_meta(operand)) return scalars_.join(meta->scalars);
    if (operand.defined()) add(operand);
  }
  void add(const at::Scalar& number) {
    if (number.isFloatingPoint()) return add(number.toDouble());
    if (number.isIntegral(/*includeBool=*/true)) return add(number.toLong());
    if (!number.isComplex()) return;
    const auto parts = number.toComplexDouble();
    add(parts.real());
    add(parts.imag());
  }
  // To twenty binary places: machines round otherwise, data differ by more.
  void add(double number) {
    take((std::bit_cast<uint64_t>(number) + (1ull << 31)) >> 32, number == 1);
  }
  void add(int64_t number) { take(static_cast<uint64_t>(number), number == 1); }
  // A plain tensor: only what has no dimensions, on the CPU, is a number.
  void add(const at::Tensor& plain);
  // Of values that are copied.
  void add_values(uint64_t hash) { take(hash, /*is_one=*/false); }

  uint64_t hash() const { return scalars_.hash; }  // 0: none
  // Of the result of `op`, whose name lives on.
  ScalarHash of(const char* op) const {
    ScalarHash scalars = scalars_;
    if (has_own_) scalars.note_taker(op);
    return scalars;
  }

 private:
  void take(uint64_t bits, bool is_one) {
    scalars_.take(bits);
    has_own_ |= !is_one;
  }

  ScalarHash scalars_;
  bool has_own_ = false;  // but for ones, as alpha is by default
};

// Of all arguments. What the operator overwrites does not count, and of what it writes
// instead the values do (copy_).
ScalarHash scalar_hash_of(const OperatorTraits& traits, const TensorArguments& arguments);

}  // namespace fsdp::internal
