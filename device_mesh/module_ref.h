// A module as an argument: by reference, by its ModuleHolder or by a shared_ptr.
//
//   fsdp::fully_shard(model, mesh);      // Transformer, a ModuleHolder
//   fsdp::fully_shard(*layer, mesh);     // a torch::nn::Module&
#pragma once

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
class ModuleRef {
 public:
  ModuleRef() = default;
  ModuleRef(torch::nn::Module& module) : module_(std::shared_ptr<torch::nn::Module>(), &module) {}
  template <class Contained>
  ModuleRef(const torch::nn::ModuleHolder<Contained>& holder) : module_(holder.ptr()) {}
  template <class Contained>
  ModuleRef(std::shared_ptr<Contained> module) : module_(std::move(module)) {}

  torch::nn::Module* get() const { return module_.get(); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace fsdp
