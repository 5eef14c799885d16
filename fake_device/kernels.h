// Kernels of the fake device's own, beside those of its memory (memory.h); all others are
// shape_kernel.h's.
#pragma once

namespace torch {
class Library;
}

namespace fsdp::internal {

// `library` is aten's for PrivateUse1.
void register_kernels_without_meta(torch::Library& library);
void register_attention_kernels(torch::Library& library);

}  // namespace fsdp::internal
