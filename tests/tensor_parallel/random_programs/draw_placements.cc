#include "tests/tensor_parallel/random_programs/draw_placements.h"

#include "tests/support/draws.h"

#include <algorithm>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int kMostBackwards = 2;

struct Ranks {
  int replicas, shards, tensor_ranks;
};

int64_t draw_divisor_of(Draws& draws, int64_t number) {
  std::vector<int64_t> divisors{1};
  for (int64_t d = 2; d <= number; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return draws.pick(divisors);
}

Placement draw_placement(Draws& draws, const Program& program, const ParamSpec& param) {
  if (draws.chance(15)) return Replicate{};
  const bool is_matrix = param.use == Use::kMatmul;
  Shard cut{.dim = is_matrix ? draws.between(0, 1) : 0};
  const int64_t size = cut.dim == 1 ? program.width : rows_of(program, param);
  if (draws.chance(30)) cut.outer = draw_divisor_of(draws, size);
  if (draws.chance(30)) cut.unit = draw_divisor_of(draws, size / cut.outer);
  if (is_matrix && draws.chance(20)) cut.dim -= 2;  // counted from the end
  return cut;
}

// What is not for tensor-parallel models, or would cost their precision.
void make_double(Program& program) {
  program.activations = Dtype::kDouble;
  program.deferred = false;
  for_each_node(program.root, [](Node& node) {
    node.unit.to_halves = node.has_buffer = false;
    node.unit.precision = {};
    for (auto& param : node.params) {
      param.dtype = Dtype::kDouble;
      param.ignored = false;
    }
  });
}

// Two backwards tell what more would, in half the time.
void shorten(Program& program) {
  int backwards = 0;
  const auto end =
      std::find_if(program.actions.begin(), program.actions.end(), [&](const Action& action) {
        return runs_backward(action.kind) && ++backwards > kMostBackwards;
      });
  program.actions.erase(end, program.actions.end());
}

void draw_ranks(Draws& draws, Program& program) {
  const auto ranks = draws.pick<Ranks>({{1, 1, 2},
                                        {1, 1, 2},
                                        {1, 1, 2},
                                        {1, 1, 3},
                                        {1, 1, 3},
                                        {1, 1, 4},
                                        {1, 2, 2},
                                        {1, 2, 2},
                                        {1, 2, 2},
                                        {1, 2, 1},
                                        {1, 3, 2},
                                        {1, 2, 3},
                                        {2, 1, 2},
                                        {1, 1, 1}});
  program.replicas = ranks.replicas;
  if (program.replicas == 1) program.outer = Outer::kReplicate;
  program.world = ranks.replicas * ranks.shards;
  program.tensor_ranks = ranks.tensor_ranks;
  program.sharded = program.world > 1 || draws.chance(50);
  program.evict = program.evict && program.sharded;
}

// Parts of stated sizes do not go with cuts of a style.
void cut_evenly(Program& program) {
  for_each_node(program.root, [](Node& node) {
    for (auto& param : node.params) param.weights.clear();
  });
}

}  // namespace

Program generate_parallel(uint64_t seed) {
  Program program = generate(seed);
  cut_evenly(program);
  Draws draws(~seed);
  make_double(program);
  shorten(program);
  draw_ranks(draws, program);
  for_each_node(program.root, [&](Node& node) {
    for (auto& param : node.params) {
      if (param.tied_to < 0 && (param.anchor || draws.chance(60)))
        param.placement = draw_placement(draws, program, param);
    }
  });
  return program;
}

}  // namespace fsdp::testing
