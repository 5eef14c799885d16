#include "tests/fully_shard/random_programs/random_program.h"

#include "tests/fully_shard/random_programs/draw_actions.h"
#include "tests/fully_shard/random_programs/draw_model.h"
#include "tests/fully_shard/random_programs/draw_options.h"

#include <algorithm>

namespace fsdp::testing {

Program generate(uint64_t seed) {
  Draws draws(seed);
  Program program{.seed = seed};
  program.world = draws.pick({1, 2, 2, 2, 2, 3, 3, 4});
  program.evict = draws.chance(20);
  program.width = draws.between(1, 9);
  program.optimizer =
      draws.pick({Optimizer::kSgd, Optimizer::kMomentum, Optimizer::kAdam, Optimizer::kAdamW});
  using enum ProgramTransport;
  program.transport = Draws(~seed).pick(
      {kTestBackend, kTestBackend, kInPlace, kInPlace, kInPlace, kCopies, kCopies, kGloo});
  const auto size = draw_model(draws, program);
  draw_actions(draws, size, program);
  draw_options(draws, program);
  return program;
}

void for_each_node(const Node& root, const std::function<void(const Node&)>& visit) {
  visit(root);
  for (const auto& child : root.children) for_each_node(child, visit);
}

void for_each_node(Node& root, const std::function<void(Node&)>& visit) {
  visit(root);
  for (auto& child : root.children) for_each_node(child, visit);
}

const ParamSpec* find_param(const Program& program, int id) {
  const ParamSpec* found = nullptr;
  for_each_node(program.root, [&](const Node& node) {
    for (const auto& param : node.params) {
      if (param.id == id) found = &param;
    }
  });
  return found;
}

const ParamSpec& tensor_of(const Program& program, const ParamSpec& param) {
  const auto* target = param.tied_to >= 0 ? find_param(program, param.tied_to) : nullptr;
  return target != nullptr ? tensor_of(program, *target) : param;
}

int64_t sharded_dim(const ParamSpec& param) {
  return param.by_columns && param.use == Use::kMatmul ? 1 : 0;
}

std::vector<int64_t> bounds_of_parts(const ParamSpec& param, int64_t size, int64_t shards) {
  const int64_t capacity = (size + shards - 1) / shards;
  std::vector<int64_t> even, by_weight, sums{0};
  for (int64_t shard = 0; shard < shards; ++shard) {
    const auto weight = param.weights.empty()
                            ? 0
                            : param.weights[static_cast<size_t>(shard) % param.weights.size()];
    sums.push_back(sums.back() + weight);
  }
  for (int64_t shard = 0; shard <= shards; ++shard) {
    even.push_back(std::min(shard * capacity, size));
    if (sums.back() > 0) by_weight.push_back(size * sums[static_cast<size_t>(shard)] / sums.back());
  }
  return by_weight.empty() ? even : by_weight;
}

std::optional<Placement> placement_of_cut(const ParamSpec& param, int64_t size, int64_t shards) {
  const int64_t dim = sharded_dim(param);
  if (param.weights.empty() || size == 0)
    return dim == 1 ? std::optional<Placement>(Shard{-1}) : std::nullopt;
  const auto bounds = bounds_of_parts(param, size, shards);
  std::vector<int64_t> sizes;
  for (size_t i = 1; i < bounds.size(); ++i) sizes.push_back(bounds[i] - bounds[i - 1]);
  return RaggedShard{.dim = dim, .local_units = sizes};
}

int64_t rows_of(const Program& program, const ParamSpec& param) {
  return param.use == Use::kBias ? program.width : param.rows;
}

bool runs_backward(ActionKind kind) { return kind <= ActionKind::kEvaluateBeforeBackward; }

bool casts_members(const Program& program) {
  bool casts = false;
  for_each_node(program.root, [&casts](const Node& node) {
    const auto& precision = node.unit.precision;
    casts |= node.is_unit && (precision.param_dtype || precision.codec);
  });
  return casts;
}

int shards_of(const Program& program) { return program.world / program.replicas; }

std::vector<int64_t> mesh_shape(const Program& program) {
  std::vector<int64_t> shape{shards_of(program)};
  if (program.replicas > 1) shape.insert(shape.begin(), program.replicas);
  return shape;
}

Dtype computed_in(const PrecisionSpec& precision, Dtype dtype) {
  return precision.param_dtype.value_or(dtype);
}

Dtype reduced_in(const PrecisionSpec& precision, Dtype dtype) {
  return precision.reduce_dtype.value_or(dtype);
}

}  // namespace fsdp::testing
