// Floating-point operations of products of matrices.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace fsdp::internal {

// Adds what a call of the operator costs, multiplications and additions counted each.
// Only products count: all else is bound by memory.
void count_flops(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments);
void count_flops(double flops);

}  // namespace fsdp::internal
