// Kernels that the device has of its own: those that make or alias memory, copies from
// and to the host, and the few that a CPU kernel cannot stand for. All others are
// boxed_kernel.h's.
#pragma once

namespace torch {
class Library;
}

namespace fsdp::testing::simulated {

// `library` is aten's for the device's dispatch key.
void register_memory_kernels(torch::Library& library);
void register_copy_kernels(torch::Library& library);
void register_dropout_kernel(torch::Library& library);

}  // namespace fsdp::testing::simulated
