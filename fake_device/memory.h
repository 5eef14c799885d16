// The memory of the fake device: blocks that are counted and have no bytes, and the
// kernels that make tensors of them and copy to and from them. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>

namespace torch {
class Library;
}

namespace fsdp::internal {

c10::Allocator* fake_allocator();

// `library` is aten's for PrivateUse1.
void register_memory_kernels(torch::Library& library);

}  // namespace fsdp::internal
