// Models and training programs that nobody thought of, with random parameters cut at
// random over tensor-parallel ranks, sharded and not, against one device. FSDP_PROGRAMS
// and FSDP_FIRST_SEED in the environment choose how many and which.
#include "tensor_parallel/parallelize_module.h"
#include "tests/fully_shard/random_programs/program_run.h"
#include "tests/fully_shard/random_programs/program_worlds.h"
#include "tests/support/number_from_environment.h"
#include "tests/tensor_parallel/random_programs/draw_placements.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kShare = 120, kAll = 500;

MeshInMemory memory_of(const Program& program) {
  const int64_t tensor_ranks = program.tensor_ranks, shards = shards_of(program);
  if (!program.sharded) return MeshInMemory({tensor_ranks}, {"tp"});
  const std::vector<std::string> side_groups = {"reduce", "custom all-gather",
                                                "custom reduce-scatter"};
  if (program.replicas == 1) return MeshInMemory({shards, tensor_ranks}, {"dp", "tp"}, side_groups);
  return MeshInMemory({program.replicas, shards, tensor_ranks}, {"replicate", "dp", "tp"},
                      side_groups);
}

DeviceMesh data_mesh(const Program& program, const DeviceMesh& mesh) {
  if (!program.sharded) return mesh;  // of which nothing is sharded
  return program.replicas == 1 ? mesh["dp"] : mesh[{"replicate", "dp"}];
}

std::string path_of(const at::Tensor& parameter, const RandomModel& model) {
  for (const auto& item : model.module().named_parameters()) {
    if (item.value().is_same(parameter)) return item.key();
  }
  return "no parameter of the model";
}

ParallelPlan plan_of(const Program& program, const RandomModel& model) {
  ParallelPlan plan;
  for (const auto& [id, tensor] : model.tensors) {
    const auto& placement = find_param(program, id)->placement;
    if (!placement) continue;
    const std::string path = path_of(tensor.member, model);
    if (placement->is_shard()) plan.emplace_back(path, ShardParameter{*placement});
    if (placement->is_replicate()) plan.emplace_back(path, ReplicateParallel{});
  }
  return plan;
}

std::optional<std::string> run_parallel(const Program& program, const DeviceMesh& mesh) {
  const auto parallelize = [&](const RandomModel& model) {
    parallelize_module(model.module(), mesh["tp"], plan_of(program, model));
  };
  const int64_t data_rank = mesh.rank() / program.tensor_ranks;
  return run_program(program, data_rank, data_mesh(program, mesh), parallelize);
}

struct PlacementFeature {
  const char* name;
  std::function<bool(const Program&, const ParamSpec&)> has;
};

bool is_cut(const ParamSpec& param) { return param.placement && param.placement->is_shard(); }

int64_t cut_size(const Program& program, const ParamSpec& param) {
  const bool is_matrix = param.use == Use::kMatmul;
  const int64_t dim = param.placement->shard_dim();
  return is_matrix && (dim == 1 || dim == -1) ? program.width : rows_of(program, param);
}

// What programs must be seen to have: a parameter that is so, in a program that is so.
std::vector<PlacementFeature> placement_features() {
  const auto atoms = [](const Program& program, const ParamSpec& param) {
    const Shard& cut = param.placement->shard();
    return cut_size(program, param) / cut.outer / cut.unit;
  };
  return {
      {"a cut in units", [](auto&, auto& p) { return is_cut(p) && p.placement->shard().unit > 1; }},
      {"a cut in blocks",
       [](auto&, auto& p) { return is_cut(p) && p.placement->shard().outer > 1; }},
      {"a copy on every rank",
       [](auto&, auto& p) { return p.placement && p.placement->is_replicate(); }},
      {"no placement", [](auto&, auto& p) { return !p.placement && p.tied_to < 0; }},
      {"an uneven cut",
       [=](auto& program, auto& p) {
         return is_cut(p) && atoms(program, p) % program.tensor_ranks;
       }},
      {"an empty part",
       [=](auto& program, auto& p) {
         return is_cut(p) && atoms(program, p) < program.tensor_ranks;
       }},
      {"a cut parameter of a list", [](auto&, auto& p) { return is_cut(p) && p.in_list; }},
      {"a frozen cut parameter", [](auto&, auto& p) { return is_cut(p) && p.frozen; }},
      {"a tied cut parameter",
       [](auto& program, auto& p) { return p.tied_to >= 0 && is_cut(tensor_of(program, p)); }},
      {"cut and sharded along one dimension",
       [](auto& program, auto& p) {
         const auto dim = p.use == Use::kMatmul ? sharded_dim(p) : 0;
         return is_cut(p) && shards_of(program) > 1 && p.placement->is_shard(dim);
       }},
      {"cut and sharded along two dimensions",
       [](auto& program, auto& p) {
         return is_cut(p) && shards_of(program) > 1 && !p.placement->is_shard(sharded_dim(p));
       }},
      {"not sharded", [](auto& program, auto& p) { return is_cut(p) && !program.sharded; }},
      {"replicas of shards",
       [](auto& program, auto& p) { return is_cut(p) && program.replicas > 1; }},
      {"emptied and poisoned after every operator",
       [](auto& program, auto& p) { return is_cut(p) && program.evict; }},
  };
}

void expect_all_features(const std::vector<Program>& programs) {
  for (const auto& feature : placement_features()) {
    const auto count = std::count_if(programs.begin(), programs.end(), [&](const auto& program) {
      bool found = false;
      for_each_node(program.root, [&](const Node& node) {
        for (const auto& param : node.params) found |= feature.has(program, param);
      });
      return found;
    });
    std::printf("%-42s | %lld programs\n", feature.name, static_cast<long long>(count));
    EXPECT_GE(count, 10) << feature.name;
  }
}

TEST(RandomPlacements, HaveTheNumbersOfOneDevice) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_PROGRAMS", kShare, kAll);
  std::vector<Program> programs;
  for (uint64_t seed = first; seed < first + count; ++seed)
    programs.push_back(generate_parallel(seed));
  expect_no_difference(programs, {.memory = memory_of, .run = run_parallel});
  if (count >= kAll) expect_all_features(programs);
}

}  // namespace
}  // namespace fsdp::testing
