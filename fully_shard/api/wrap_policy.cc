#include "fully_shard/wrap_policy.h"

#include "fully_shard/units/module_tree.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

bool always_looks_below(torch::nn::Module&, int64_t) { return true; }

template <class Function>
Function not_empty(const char* caller, Function function) {
  TORCH_CHECK_VALUE(function != nullptr, caller,
                    ": the function is empty; give one that can be called");
  return function;
}

}  // namespace

WrapPolicy::WrapPolicy(LooksBelow looks_below, Choose choose)
    : looks_below_(not_empty("WrapPolicy", std::move(looks_below))),
      choose_(not_empty("WrapPolicy", std::move(choose))) {}

WrapPolicy::WrapPolicy(Ask ask) {
  not_empty("WrapPolicy", ask);
  looks_below_ = [ask](torch::nn::Module& module, int64_t numel_left) {
    return ask(module, /*recurse=*/true, numel_left);
  };
  choose_ = [ask](torch::nn::Module& module, int64_t numel_left,
                  const FullyShardOptions& root_options) {
    return ask(module, /*recurse=*/false, numel_left) ? std::optional(root_options) : std::nullopt;
  };
}

bool WrapPolicy::looks_below(torch::nn::Module& module, int64_t numel_left) const {
  return looks_below_(module, numel_left);
}

std::optional<FullyShardOptions> WrapPolicy::choose(torch::nn::Module& module, int64_t numel_left,
                                                    const FullyShardOptions& root_options) const {
  return choose_(module, numel_left, root_options);
}

bool WrapPolicy::operator()(torch::nn::Module& module, bool recurse, int64_t numel_left) const {
  return recurse ? looks_below(module, numel_left) : choose(module, numel_left, {}).has_value();
}

WrapPolicy by_fn(std::function<bool(torch::nn::Module&)> is_unit) {
  not_empty("by_fn", is_unit);
  return WrapPolicy([is_unit](torch::nn::Module& module, bool recurse, int64_t) {
    return recurse || is_unit(module);
  });
}

WrapPolicy by_fn(
    std::function<std::optional<FullyShardOptions>(torch::nn::Module&, FullyShardOptions)>
        options_of) {
  not_empty("by_fn", options_of);
  return WrapPolicy(always_looks_below, [options_of](torch::nn::Module& module, int64_t,
                                                     const FullyShardOptions& root_options) {
    return options_of(module, root_options);
  });
}

WrapPolicy by_size(int64_t min_numel) {
  TORCH_CHECK_VALUE(min_numel >= 1, "by_size: min_numel is ", min_numel, "; allowed: 1 and more");
  return WrapPolicy([min_numel](torch::nn::Module& module, bool recurse, int64_t numel_left) {
    if (numel_left < min_numel) return false;
    return recurse ? !internal::is_a<torch::nn::MultiheadAttention>(module)
                   : !internal::is_container_without_forward(module);
  });
}

WrapPolicy every_module() {
  return by_fn(
      [](torch::nn::Module& module) { return !internal::is_container_without_forward(module); });
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the lambda keeps a copy
WrapPolicy by_any(std::vector<WrapPolicy> policies) {
  TORCH_CHECK_VALUE(!policies.empty(), "by_any: the list of policies is empty");
  const auto looks_below = [policies](torch::nn::Module& module, int64_t numel_left) {
    return std::any_of(policies.begin(), policies.end(), [&](const WrapPolicy& policy) {
      return policy.looks_below(module, numel_left);
    });
  };
  const auto choose = [policies](torch::nn::Module& module, int64_t numel_left,
                                 const FullyShardOptions& root_options) {
    std::optional<FullyShardOptions> chosen;
    for (const auto& policy : policies) {
      if (!chosen) chosen = policy.choose(module, numel_left, root_options);
    }
    return chosen;
  };
  return WrapPolicy(looks_below, choose);
}

}  // namespace fsdp
