// How a copy of a DTensor, or a new one like it, lies in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Global strides in the memory format that an operator's argument asks for: a null
// argument, None and Preserve mean the order of `self`'s dimensions, without gaps.
std::vector<int64_t> strides_of_copy(const at::Tensor& self, const c10::IValue* memory_format);

}  // namespace fsdp::internal
