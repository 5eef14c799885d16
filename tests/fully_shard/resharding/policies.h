// Combinations of policies: a mesh, what becomes of unsharded parameters after forward,
// and how gradients accumulate.
#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/resharding/expected_traffic.h"
#include "tests/fully_shard/resharding/varied_model.h"

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct Policies {
  std::vector<int64_t> mesh;
  std::optional<ReshardAfterForward> reshard;

  bool is_hybrid() const { return mesh.size() == 2; }
  int64_t shards() const { return mesh.back(); }
  int64_t ranks() const { return is_hybrid() ? mesh[0] * mesh[1] : mesh[0]; }
  // That hold what a unit's backward gathers.
  int64_t neighbours() const { return reshard->world().value_or(shards()); }
};

inline std::string name_of(const Policies& policies) {
  std::string name = "Mesh";
  for (const auto size : policies.mesh) name += (name == "Mesh" ? "" : "x") + std::to_string(size);
  if (policies.reshard->world()) return name + "ToWorld" + std::to_string(policies.neighbours());
  return name + (policies.reshard->reshards() ? "True" : "False");
}

inline std::vector<Policies> all_policies() {
  std::vector<Policies> all;
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}) {
    for (const bool reshard : {true, false}) all.push_back({mesh, ReshardAfterForward(reshard)});
  }
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{4}, {2, 4}})
    all.push_back({mesh, ReshardAfterForward::to_world(2)});
  return all;
}

inline DeviceMesh mesh_of(const Policies& policies) {
  if (!policies.is_hybrid()) return init_device_mesh(torch::kCPU, policies.mesh);
  return init_device_mesh(torch::kCPU, policies.mesh, {"replicate", "shard"});
}

// Blocks are units with the policy; the rest belongs to the root, which stays.
inline void shard(VariedModel& model, const DeviceMesh& mesh, const Policies& policies) {
  for (auto& block : model->blocks)
    fully_shard(block, mesh, {.reshard_after_forward = policies.reshard});
  fully_shard(model, mesh);
}

inline torch::Tensor tokens_of(const VariedModel& model, int64_t step, int64_t micro,
                               int64_t rank) {
  const auto seed = static_cast<uint64_t>(100 * step + 10 * micro + rank);
  return torch::randint(model->rows, {4}, at::detail::createCPUGenerator(seed));
}

inline torch::Tensor loss_on(VariedModel& model, const torch::Tensor& tokens) {
  return model(tokens).pow(2).mean();
}

inline void run_micro_batch(VariedModel& model, const torch::Tensor& tokens,
                            Accumulation accumulation, bool is_last) {
  auto unit = get_fsdp_module(*model);
  std::optional<NoSyncGuard> guard;
  if (accumulation == Accumulation::kNoSync && !is_last) guard.emplace(unit);
  if (accumulation == Accumulation::kShardsOnly) unit.set_requires_all_reduce(is_last);
  loss_on(model, tokens).backward();
}

}  // namespace fsdp::testing
