// Views of DTensors under autograd. What is written in place through a view, autograd
// undoes in backward by taking the same view of the base's gradient: with as_strided(),
// unless the view was made with view replay on (c10::AutogradState). DTensors have no
// memory to stride over, so view operators that meet one run with replay on. Plain
// tensors are left as they are.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// Registers the view operators of LibTorch under kFirstKey. Appends the registrations.
void register_view_replay(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
