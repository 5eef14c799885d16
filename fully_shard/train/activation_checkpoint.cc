#include "fully_shard/activation_checkpoint.h"

#include "dtensor/random/thread_generators.h"
#include "on_demand/pass.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

namespace fsdp::internal {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What a region's result depends on besides its inputs: the generators that it draws from
// and, if it is to draw the same again, their states; and autocast, on the CPU and the
// inputs' devices.
class Surroundings {
 public:
  static Surroundings now(const std::vector<c10::Device>& devices,
                          const CheckpointOptions& options) {
    Surroundings now;
    for (const auto device : devices) {
      auto generator = generator_of_thread(device);
      auto state = options.preserve_rng_state ? generator_state(generator) : at::Tensor();
      now.states_.push_back({device.type(), std::move(generator), std::move(state),
                             at::autocast::is_autocast_enabled(device.type()),
                             at::autocast::get_autocast_dtype(device.type())});
    }
    return now;
  }

  void restore() const {
    for (const auto& state : states_) {
      if (state.random.defined()) set_generator_state(state.generator, state.random);
      at::autocast::set_autocast_enabled(state.type, state.autocast);
      at::autocast::set_autocast_dtype(state.type, state.autocast_dtype);
    }
  }

  const ThreadGeneratorsPtr& generators() const { return generators_; }

 private:
  struct OnDevice {
    c10::DeviceType type;
    at::Generator generator;
    at::Tensor random;  // undefined: not kept
    bool autocast;
    at::ScalarType autocast_dtype;
  };
  ThreadGeneratorsPtr generators_ = thread_generators();
  std::vector<OnDevice> states_;
};

// As it was then, for the length of a scope. What autocast casts within it, it keeps no
// longer than an outer scope of autocast: the parameters are written between steps.
class SurroundingsGuard {
 public:
  SurroundingsGuard(const Surroundings& then, const std::vector<c10::Device>& devices,
                    const CheckpointOptions& options)
      : drawn_from_(then.generators()), before_(Surroundings::now(devices, options)) {
    at::autocast::increment_nesting();
    then.restore();
  }
  ~SurroundingsGuard() {
    before_.restore();
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  SurroundingsGuard(const SurroundingsGuard&) = delete;

 private:
  UseThreadGenerators drawn_from_;
  Surroundings before_;
};

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& inputs) {
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  for (const auto& input : inputs) {
    if (!input.defined() || input.is_cpu() || input.is_meta()) continue;
    if (std::find(devices.begin(), devices.end(), input.device()) == devices.end())
      devices.push_back(input.device());
  }
  return devices;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs)
    leaves.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad())
                                     : input);
  return leaves;
}

using NodePtr = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

// The node of a region in autograd's graph: its inputs are the region's outputs.
class Recompute final : public torch::autograd::Node {
 public:
  Recompute(CheckpointRegion region, const std::vector<at::Tensor>& inputs,
            const CheckpointOptions& options)
      : Node(torch::autograd::collect_next_edges(inputs)),
        region_(std::move(region)),
        options_(options),
        devices_(devices_of(inputs)),
        surroundings_(Surroundings::now(devices_, options)) {
    for (const auto& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  // The outputs of the region's first run, as results of this node.
  std::vector<at::Tensor> adopt(const NodePtr& self, const std::vector<at::Tensor>& outputs) {
    std::vector<at::Tensor> adopted;
    for (const auto& output : outputs) {
      const bool differentiable =
          output.defined() && (output.is_floating_point() || output.is_complex());
      adopted.push_back(differentiable ? output.detach() : output);
      if (differentiable) {
        torch::autograd::set_history(adopted.back(), self);
      } else {
        add_input_metadata(undefined_input());
      }
    }
    return adopted;
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    check_backward_is_plain();
    const auto inputs = detached(unpacked());
    const auto outputs = run_again(inputs);
    TORCH_CHECK(outputs.size() == gradients.size(), "fsdp::checkpoint: the region gave ",
                gradients.size(), " outputs in forward and ", outputs.size(),
                " when backward ran it again; it must do the same both times");
    variable_list roots, root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list input_gradients;
    for (const auto& input : inputs)
      input_gradients.push_back(input.defined() ? input.grad() : at::Tensor());
    return input_gradients;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    inputs_.clear();
    region_ = nullptr;
  }
  std::string name() const override { return "fsdp::checkpoint"; }

 private:
  void check_backward_is_plain() const {
    TORCH_CHECK(region_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    TORCH_CHECK_VALUE(!c10::GradMode::is_enabled(),
                      "backward(create_graph=true) through fsdp::checkpoint: a region that runs "
                      "again has no graph of its gradients; call the region without checkpoint");
    TORCH_CHECK_VALUE(accumulates_everywhere(),
                      "autograd::grad or backward(inputs) through fsdp::checkpoint: running a "
                      "region again adds to the .grad of every parameter in it; use backward(), or "
                      "call the region without checkpoint");
  }

  std::vector<at::Tensor> unpacked() const {
    std::vector<at::Tensor> inputs;
    for (const auto& input : inputs_) inputs.push_back(input.unpack());
    return inputs;
  }

  std::vector<at::Tensor> run_again(const std::vector<at::Tensor>& inputs) const {
    const SurroundingsGuard guard(surroundings_, devices_, options_);
    const at::AutoGradMode record(true);
    return region_(inputs);
  }

  std::mutex mutex_;
  CheckpointRegion region_;  // null once the graph was freed
  CheckpointOptions options_;
  std::vector<c10::Device> devices_;
  Surroundings surroundings_;
  std::vector<SavedVariable> inputs_;
};

// As LibTorch keeps nodes: until 2.15 by a shared_ptr of its own way to delete.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
std::shared_ptr<Recompute> make_node(const CheckpointRegion& region,
                                     const std::vector<at::Tensor>& inputs,
                                     const CheckpointOptions& options) {
  return {new Recompute(region, inputs, options), torch::autograd::deleteNode};
}
#else
c10::intrusive_ptr<Recompute> make_node(const CheckpointRegion& region,
                                        const std::vector<at::Tensor>& inputs,
                                        const CheckpointOptions& options) {
  return c10::make_intrusive<Recompute>(region, inputs, options);
}
#endif

}  // namespace

std::vector<at::Tensor> run_checkpointed(CheckpointRegion region,
                                         const std::vector<at::Tensor>& inputs,
                                         const CheckpointOptions& options) {
  if (!c10::GradMode::is_enabled()) return region(inputs);
  const auto node = make_node(region, inputs, options);
  std::vector<at::Tensor> outputs;
  {
    const at::AutoGradMode do_not_record(false);
    const CheckpointedForward forward;
    outputs = region(detached(inputs));
  }
  return node->adopt(node, outputs);
}

}  // namespace fsdp::internal
