// What an operator is given that counts among the numbers of its result.
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/tensor_arguments.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/numbers.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <bit>
#include <cstdint>

namespace fsdp::internal {

class NumbersMet {
 public:
  // A tensor of either kind, or none.
  void meet(const at::Tensor& operand) {
    if (const auto* const meta = find_meta(operand)) return numbers_.join(meta->numbers);
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

  uint64_t hash() const { return numbers_.hash; }  // 0: none
  // Of the result of `op`, whose name lives on.
  Numbers of(const char* op) const {
    Numbers numbers = numbers_;
    if (has_own_) numbers.note_taker(op);
    return numbers;
  }

 private:
  void take(uint64_t bits, bool is_one) {
    numbers_.take(bits);
    has_own_ |= !is_one;
  }

  Numbers numbers_;
  bool has_own_ = false;  // but for ones, as alpha is by default
};

// Of all arguments. What the operator overwrites does not count, and of what it writes
// instead the values do (copy_).
Numbers numbers_met(const OperatorTraits& traits, const TensorArguments& arguments);

}  // namespace fsdp::internal
