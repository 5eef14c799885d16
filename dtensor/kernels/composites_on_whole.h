// Composite operators of LibTorch that read a tensor's memory themselves: quantile and
// nanquantile, since LibTorch 2.15. A DTensor has none, and autograd takes composites
// apart before an operator of theirs reaches kDTensorKey. So they run on the whole
// values, on every rank, and give a replicated DTensor; differentiable.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Registers them under kFirstKey. Appends the registrations.
void register_composites_on_whole(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
