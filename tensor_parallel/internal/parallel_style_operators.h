// Where styles act: at the operator that reads the parameter, so that no module needs to
// know of it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace fsdp::internal {

// linear, matmul, mm and addmm with a weight or its transpose; embedding; layer_norm and
// rms_norm. Their input goes where the style wants it, then their result; a result that
// is whole then is handed out plain.
void register_styled_operators(std::vector<c10::RegistrationHandleRAII>& handles);

}  // namespace fsdp::internal
