// Running operators on DTensors. An operator that meets a DTensor below autograd comes to
// one boxed kernel (some come to fast_pointwise.cc first), which tells the owners of what
// will be written and read, and has the operator run on local tensors as the table says
// (dtensor/ops/op_table.h), else on whole values. What the kernel does may be collective:
// see each entry, and run_by_strategy.h.
#pragma once

#include "dtensor/dispatch/operator_call.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

// The boxed kernel of an operator. None for operators that autograd takes apart.
std::optional<c10::KernelFunction> kernel_of(const c10::OperatorHandle& op);

// What follows registers kernels besides that one, each in the file of its name, and
// appends the registrations.
using KernelHandles = std::vector<c10::RegistrationHandleRAII>;

// Unboxed kernels of the operators that OpTable::unboxed() lists, and of no others.
void register_fast_pointwise(KernelHandles& handles);
// The view operators of LibTorch, under kFirstKey.
void register_view_replay(KernelHandles& handles);
// Composite operators that must not be taken apart as LibTorch would, under kFirstKey:
// autograd takes composites apart before an operator of theirs reaches kDTensorKey.
void register_composites(KernelHandles& handles);

}  // namespace fsdp::internal
