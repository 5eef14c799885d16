#include "fully_shard/train/same_parameters.h"

#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/registry_entry.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

std::string line_of(const at::Tensor& parameter) {
  const auto* const found = RegistryEntry::of(parameter);
  if (found == nullptr) {
    const auto& style = *meta_of(parameter).style;
    return c10::str("parameter '", style.path, "' (tensor-parallel by operation ",
                    style.number_of_model, " of its mesh)\n");
  }
  const auto& entry = *found;
  return c10::str("parameter '", *entry.parameter_name(), "' (number ", entry.index(), " of unit '",
                  entry.group()->info().name(), "', which is number ",
                  entry.group()->info().number(), " of its ranks' units)\n");
}

// The same on all ranks; 0: it is the parameter of no unit, and not tensor-parallel.
size_t hash_of_parameter(const at::Tensor& parameter) {
  size_t hash = 1;
  if (const auto* const entry = RegistryEntry::of(parameter)) {
    hash = c10::hash_combine(hash, entry->group()->info().number());
    return c10::hash_combine(hash, static_cast<size_t>(entry->index()));
  }
  const auto* const meta = find_meta(parameter);
  if (meta == nullptr || !meta->style) return 0;
  for (const char letter : meta->style->path)
    hash = c10::hash_combine(hash, static_cast<size_t>(letter));
  return c10::hash_combine(hash, meta->style->number_of_model);
}

}  // namespace

void claim_parameters(Claims& claims, const std::vector<at::Tensor>& parameters) {
  struct OnMesh {
    DeviceMesh mesh;
    size_t hash = 0;
    std::vector<at::Tensor> parameters = {};
  };
  std::vector<OnMesh> meshes;  // in the order met
  for (const auto& parameter : parameters) {
    const auto hash = hash_of_parameter(parameter);
    if (hash == 0) continue;
    const auto& mesh = spec_of(parameter).mesh();
    auto on = std::find_if(meshes.begin(), meshes.end(), [&mesh](const OnMesh& each) {
      return each.mesh.shape() == mesh.shape() && each.mesh.ranks() == mesh.ranks();
    });
    if (on == meshes.end()) on = meshes.insert(on, OnMesh{mesh});
    on->hash = c10::hash_combine(on->hash, hash);
    on->parameters.push_back(parameter);
  }
  for (auto& on : meshes) {
    auto topic = c10::str("the parameters on mesh ", c10::IntArrayRef(on.mesh.shape()),
                          " of ranks ", c10::IntArrayRef(on.mesh.ranks()));
    claims.add(std::move(topic), on.hash, [parameters = std::move(on.parameters)] {
      std::string text;
      for (const auto& parameter : parameters) text += line_of(parameter);
      return text;
    });
  }
}

}  // namespace fsdp::internal
