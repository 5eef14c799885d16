// Handles of what is saved and loaded, made from the objects themselves, so that
// checkpoint.h needs no heavy header.
#pragma once

#include <memory>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
class LRScheduler;
}  // namespace torch::optim

namespace fsdp {

// None own; the object outlives the call it is given to. Null by default.
class ModuleRef {
 public:
  ModuleRef() = default;
  ModuleRef(torch::nn::Module& module) : module_(&module) {}
  template <class Contained>
  ModuleRef(const torch::nn::ModuleHolder<Contained>& module)
      : module_(static_cast<torch::nn::Module*>(module.ptr().get())) {}
  template <class Contained>
  ModuleRef(const std::shared_ptr<Contained>& module) : module_(module.get()) {}

  torch::nn::Module* get() const { return module_; }

 private:
  torch::nn::Module* module_ = nullptr;
};

class OptimizerRef {
 public:
  OptimizerRef() = default;
  OptimizerRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  template <class Derived>
  OptimizerRef(const std::unique_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}
  template <class Derived>
  OptimizerRef(const std::shared_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}

  torch::optim::Optimizer* get() const { return optimizer_; }

 private:
  torch::optim::Optimizer* optimizer_ = nullptr;
};

class SchedulerRef {
 public:
  SchedulerRef() = default;
  SchedulerRef(torch::optim::LRScheduler& scheduler) : scheduler_(&scheduler) {}

  torch::optim::LRScheduler* get() const { return scheduler_; }

 private:
  torch::optim::LRScheduler* scheduler_ = nullptr;
};

}  // namespace fsdp
