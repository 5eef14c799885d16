#include "tensor_parallel/internal/planned_parameters.h"

#include "deferred_init/deferred_storage.h"
#include "device_mesh/internal/name_pattern.h"
#include "dtensor/dtensor.h"
#include "on_demand/gate_key.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

ModuleKind kind_of(torch::nn::Module& module) {
  if (module.as<torch::nn::EmbeddingImpl>() != nullptr) return ModuleKind::kEmbedding;
  if (module.as<torch::nn::MultiheadAttentionImpl>() != nullptr) return ModuleKind::kAttention;
  if (module.as<torch::nn::LayerNormImpl>() != nullptr) return ModuleKind::kNorm;
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto* const weight = parameters.find("weight");
  if (weight != nullptr && weight->dim() == 2) return ModuleKind::kProduct;
  const bool is_of_libtorch = module.name().starts_with("torch::nn::");
  const bool has_matrices = std::any_of(parameters.begin(), parameters.end(),
                                        [](const auto& each) { return each.value().dim() > 1; });
  return is_of_libtorch || has_matrices ? ModuleKind::kOther : ModuleKind::kNorm;
}

// The attention module that has this one as its output projection.
struct AttentionAbove {
  std::string path;
  int64_t head_width;
};

// A parameter under one of its names.
struct Named {
  std::string module_path;
  std::string path;
  at::Tensor tensor;
  ParameterRole role;
  std::optional<AttentionAbove> attention;
};

std::vector<Named> named_parameters(torch::nn::Module& module) {
  std::vector<Named> all;
  std::unordered_map<const torch::nn::Module*, AttentionAbove> attention_above;
  for (const auto& item : module.named_modules()) {
    const auto* const attention = item.value()->as<torch::nn::MultiheadAttentionImpl>();
    const int64_t head_width = attention == nullptr ? 0 : attention->head_dim;
    if (attention != nullptr) attention_above[attention->out_proj.get()] = {item.key(), head_width};
    const auto above = attention_above.find(item.value().get());
    for (const auto& parameter : item.value()->named_parameters(/*recurse=*/false)) {
      const std::string prefix = item.key().empty() ? "" : item.key() + ".";
      all.push_back({.module_path = item.key(),
                     .path = prefix + parameter.key(),
                     .tensor = parameter.value(),
                     .role = {.kind = kind_of(*item.value()),
                              .leaf = parameter.key(),
                              .shape = parameter.value().sizes().vec(),
                              .module_type = item.value()->name(),
                              .head_width = head_width},
                     .attention = above == attention_above.end() ? std::nullopt
                                                                 : std::optional(above->second)});
    }
  }
  return all;
}

bool is_meant(const std::string& pattern, const ParallelStyle& style, const Named& parameter) {
  if (is_match(pattern, parameter.path)) return true;
  return !std::holds_alternative<ShardParameter>(style) && is_match(pattern, parameter.module_path);
}

void check_pattern(const std::string& pattern, const ParallelStyle& style,
                   torch::nn::Module& module, const std::vector<Named>& parameters, int64_t rank) {
  if (std::any_of(parameters.begin(), parameters.end(),
                  [&](const Named& each) { return is_meant(pattern, style, each); }))
    return;
  for (const auto& item : module.named_modules()) {
    TORCH_CHECK_VALUE(!is_match(pattern, item.key()), "parallelize_module: plan entry '", pattern,
                      "' means the module '", item.key(), "' (", item.value()->name(), "), ",
                      std::holds_alternative<ShardParameter>(style)
                          ? "but ShardParameter is for a parameter: add its name"
                          : "which has no parameters of its own; name the modules below it",
                      " (rank ", rank, ")");
  }
  TORCH_CHECK_VALUE(false, "parallelize_module: plan entry '", pattern,
                    "' matches no module and no parameter; a '*' stands for a part of one name, ",
                    "as in 'block*.mlp.up' (rank ", rank, ")");
}

// Of the last entry that means the parameter, or the attention module above it.
std::optional<ParallelStyle> last_style(const ParallelPlan& plan, const Named& parameter) {
  for (auto entry = plan.rbegin(); entry != plan.rend(); ++entry) {
    const auto& [pattern, style] = *entry;
    if (is_meant(pattern, style, parameter)) return style;
    const auto* const heads = std::get_if<ColwiseParallel>(&style);
    if (heads != nullptr && parameter.attention && is_match(pattern, parameter.attention->path))
      return style_of_output_projection(*heads, parameter.attention->head_width);
  }
  return std::nullopt;
}

void check_parameter(const Named& parameter, const DeviceMesh& mesh) {
  const at::Tensor& tensor = parameter.tensor;
  const auto check = [&](bool fits, const std::string& what) {
    TORCH_CHECK_VALUE(fits, "parallelize_module: parameter '", parameter.path, "' ", what,
                      " (rank ", mesh.rank(), ")");
  };
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  check(!is_dtensor(tensor),
        "is a DTensor already; apply parallelize_module once, and before fully_shard");
  check(!keys.has(kGateKey) || DeferredStorage::of(tensor) != nullptr,
        "is sharded by fully_shard; apply parallelize_module first");
  check(tensor.is_meta() || tensor.device().type() == mesh.device_type(),
        c10::str("is on ", tensor.device(), " but the mesh is of device type ",
                 c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true)));
  check(tensor.layout() == c10::kStrided && tensor.is_contiguous(), "is not contiguous");
  check(tensor.is_leaf(), "is not a leaf");
  check(!tensor.grad().defined(), "has a .grad; call zero_grad() first");
}

ParallelParameter in_words(const Named& parameter, int64_t rank, const auto& make) {
  try {
    return make();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "parallelize_module: parameter '", parameter.path, "' of shape ",
                      parameter.tensor.sizes(), ": ", error.what(), " (rank ", rank, ")");
  }
}

}  // namespace

std::vector<PlannedParameter> planned_parameters(torch::nn::Module& module, const DeviceMesh& mesh,
                                                 const ParallelPlan& plan) {
  const auto parameters = named_parameters(module);
  for (const auto& [pattern, style] : plan) {
    check_pattern(pattern, style, module, parameters, mesh.rank());
  }
  std::vector<std::pair<const Named*, ParallelParameter>> planned;
  std::unordered_map<const c10::TensorImpl*, size_t> position;
  for (const Named& parameter : parameters) {
    const auto style = last_style(plan, parameter);
    if (!style) continue;
    check_parameter(parameter, mesh);
    auto styled = in_words(parameter, mesh.rank(),
                           [&] { return parallel_parameter(*style, parameter.role); });
    const auto [at, is_new] =
        position.emplace(parameter.tensor.unsafeGetTensorImpl(), planned.size());
    if (is_new) {
      planned.emplace_back(&parameter, std::move(styled));
    } else {
      auto& known = planned[at->second].second;
      known = in_words(parameter, mesh.rank(), [&] { return tied(known, styled); });
    }
  }
  std::vector<PlannedParameter> result;
  for (const auto& [parameter, styled] : planned) {
    const at::Tensor& tensor = parameter->tensor;
    result.push_back(
        {.path = parameter->path,
         .member = tensor,
         .spec = DTensorSpec(mesh, {styled.placement}, tensor.sizes().vec(), tensor.strides().vec())
                     .simplified(),
         .uses = styled.uses,
         .batches = styled.batches});
  }
  return result;
}

}  // namespace fsdp::internal
