// Tensor::set_data replaces a tensor's data behind the dispatcher's back, but asks
// _has_compatible_shallow_copy_type first. Here it is refused where it would part a
// parameter from its sharded storage, and made right for registry entries, which is how
// Module::to(dtype) works on a sharded module.
#pragma once

namespace fsdp::internal {

// REQUIRES: called once per process (install_gate() does).
void register_set_data_kernels();

}  // namespace fsdp::internal
