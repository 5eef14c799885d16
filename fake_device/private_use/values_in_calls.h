// Tensors in the arguments and results of operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>

namespace fsdp::internal {

// `value` with each defined tensor in it, in lists too, replaced by what `replace`
// returns.
c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& replace);

bool is_written(const c10::Argument& argument);

// The argument among `given` that result `result` of the schema is.
const c10::IValue& returned_argument(const c10::FunctionSchema& schema,
                                     const std::vector<c10::IValue>& given, size_t result);

}  // namespace fsdp::internal
