// The module that a caller of a public function gave, by reference, holder or shared_ptr.
#pragma once

#include "device_mesh/module_ref.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

// Throws ValueError where it is null; the text begins with `caller`, a function's name.
template <class Module>
Module& given_module(const char* caller, const BasicModuleRef<Module>& module) {
  TORCH_CHECK_VALUE(module.get() != nullptr, caller,
                    ": the module is null (a shared_ptr that was never set?); give a module");
  return *module.get();
}

}  // namespace fsdp::internal
