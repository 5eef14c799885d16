// A module as an argument: by reference, by its ModuleHolder or by a shared_ptr.
//
//   fsdp::fully_shard(model, mesh);      // Transformer, a ModuleHolder
//   fsdp::fully_shard(*layer, mesh);     // a torch::nn::Module&
#pragma once

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace fsdp {

// Shares a module that it was made from a holder or a shared_ptr of, so temporaries of
// these are fine; a module that is given by reference outlives it. Null by default.
template <class Module>
class BasicModuleRef {
 public:
  BasicModuleRef() = default;
  BasicModuleRef(Module& module) : module_(std::shared_ptr<Module>(), &module) {}
  template <class Contained>
  BasicModuleRef(const torch::nn::ModuleHolder<Contained>& holder) : module_(holder.ptr()) {}
  template <class Contained>
  BasicModuleRef(std::shared_ptr<Contained> module) : module_(std::move(module)) {}

  Module* get() const { return module_.get(); }

 private:
  std::shared_ptr<Module> module_;
};

using ModuleRef = BasicModuleRef<torch::nn::Module>;
using ConstModuleRef = BasicModuleRef<const torch::nn::Module>;  // of what only reads it

namespace internal {

// The module that a caller of a public function gave. Throws ValueError where it is null;
// the text begins with `caller`, that function's name.
template <class Module>
Module& given_module(const char* caller, const BasicModuleRef<Module>& module) {
  TORCH_CHECK_VALUE(module.get() != nullptr, caller,
                    ": the module is null (a shared_ptr that was never set?); give a module");
  return *module.get();
}

}  // namespace internal

}  // namespace fsdp
