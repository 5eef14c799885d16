// Optimizers and schedulers as what is saved and loaded, made from the objects
// themselves, so that checkpoint.h needs no heavy header.
#pragma once

#include "device_mesh/module_ref.h"

#include <memory>

namespace torch::optim {
class Optimizer;
class LRScheduler;
}  // namespace torch::optim

namespace fsdp {

// Neither owns; the object outlives the call it is given to. Null by default.
class OptimizerRef {
 public:
  OptimizerRef() = default;
  OptimizerRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  template <class Derived>
  OptimizerRef(const std::unique_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}
  template <class Derived>
  OptimizerRef(const std::shared_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}
  // What a temporary owns is gone before it is saved.
  template <class Derived>
  OptimizerRef(std::unique_ptr<Derived>&& optimizer) = delete;
  template <class Derived>
  OptimizerRef(std::shared_ptr<Derived>&& optimizer) = delete;

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
