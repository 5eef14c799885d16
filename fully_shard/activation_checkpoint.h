// Activation checkpointing: memory for time. Of all that a region of the forward saves
// for backward only its inputs are kept, and backward runs the region again.
//
//   auto y = fsdp::checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
//   auto [a, b] = fsdp::checkpoint([&](auto x, auto mask) { return attend(x, mask); }, x, mask);
//   auto z = fsdp::checkpoint(block, x);   // a ModuleHolder, or a shared_ptr to a module
//   auto w = fsdp::checkpoint({.preserve_rng_state = false}, block, x);
//
// A unit inside a region is gathered once in forward and once when the region runs again;
// the backward of what then ran gathers nothing more. Regions nest.
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

struct CheckpointOptions {
  // Whether a region that runs again draws the random numbers that it drew in forward.
  // Without, it draws new ones: for regions that draw none. On a device, reading the
  // generator's state is a copy to the host, and not possible while a CUDA graph is
  // captured.
  bool preserve_rng_state = true;
};

namespace internal {

using CheckpointRegion =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
FSDP_API std::vector<at::Tensor> run_checkpointed(CheckpointRegion region,
                                                  const std::vector<at::Tensor>& inputs,
                                                  const CheckpointOptions& options);

inline std::vector<at::Tensor> as_list(at::Tensor output) { return {std::move(output)}; }
inline std::vector<at::Tensor> as_list(std::vector<at::Tensor> outputs) { return outputs; }
template <class... Outputs>
std::vector<at::Tensor> as_list(const std::tuple<Outputs...>& outputs) {
  return std::apply([](const auto&... each) { return std::vector<at::Tensor>{each...}; }, outputs);
}

// The list as the region gave it.
template <class Result>
Result from_list(std::vector<at::Tensor> outputs) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return std::move(outputs.front());
  } else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
    return outputs;
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) { return Result(std::move(outputs[I])...); }
    (std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

}  // namespace internal

// region(inputs...), whose result is a Tensor, a vector of Tensors or a tuple of Tensors.
// Gradients reach the inputs and whatever else the region uses (parameters, captured
// tensors that are leaves). The region runs again with the state that autocast had here,
// and, with preserve_rng_state, the generators that it draws from, those of the CPU and
// of the inputs' devices (LibTorch's or manual_seed's); what else it reads must not have
// changed. Where no gradients are recorded this is region(inputs...).
//
// Collective as what the region touches. Backward throws ValueError under
// create_graph=true and in autograd::grad or backward(inputs), since running again
// accumulates into every leaf; and torch's error where an input was written since, or the
// graph was freed.
template <class Region, class... Inputs>
auto checkpoint(const CheckpointOptions& options, Region region, const Inputs&... inputs) {
  using Result = std::decay_t<std::invoke_result_t<Region&, const Inputs&...>>;
  auto on_list = [region = std::move(region)](const std::vector<at::Tensor>& list) mutable {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return internal::as_list(region(list[I]...));
    }
    (std::index_sequence_for<Inputs...>());
  };
  return internal::from_list<Result>(
      internal::run_checkpointed(std::move(on_list), {at::Tensor(inputs)...}, options));
}
// module->forward(inputs...). The module lives until the backward is done.
template <class Module, class... Inputs>
auto checkpoint(const CheckpointOptions& options, const std::shared_ptr<Module>& module,
                const Inputs&... inputs) {
  return checkpoint(
      options, [module](const Inputs&... each) { return module->forward(each...); }, inputs...);
}
// With the options as they are.
template <class Region, class... Inputs>
auto checkpoint(Region region, const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), std::move(region), inputs...);
}

}  // namespace fsdp
