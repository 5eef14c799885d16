#include "tests/fully_shard/random_programs/draw_options.h"

namespace fsdp::testing {
namespace {

// Some accumulations then keep sums over the shards in place of unreduced gradients.
void draw_replicas(Draws& draws, Program& program) {
  if (program.world == 1 || !draws.chance(30)) return;
  program.replicas = program.world == 4 ? draws.pick({2, 2, 4}) : program.world;
  bool changed = false;
  for (auto& action : program.actions) {
    if (action.kind != ActionKind::kSetSync) continue;
    if (!action.flag) changed = draws.chance(50);
    if (changed) action.kind = ActionKind::kSetAllReduce;
  }
}

// Parts of stated sizes are not cut once more.
void draw_outer(Draws& draws, Program& program) {
  bool has_weights = false;
  for_each_node(program.root, [&](const Node& node) {
    for (const auto& param : node.params) has_weights = has_weights || !param.weights.empty();
  });
  if (program.replicas > 1 && !has_weights && draws.chance(50))
    program.outer = Outer::kShardOptimizer;
}

void draw_halves(Draws& draws, Program& program) {
  if (shards_of(program) != 4) return;
  for_each_node(program.root, [&](Node& node) {
    const bool reshards = node.is_unit && node.unit.reshard_after_forward == true;
    if (reshards) node.unit.to_halves = draws.chance(60);
  });
}

PrecisionSpec draw_precision_of_unit(Draws& draws) {
  PrecisionSpec precision;
  if (draws.chance(80)) {
    precision.param_dtype = draws.pick(
        {Dtype::kBFloat16, Dtype::kBFloat16, Dtype::kHalf, Dtype::kDouble, Dtype::kFloat});
  }
  if (draws.chance(50)) {
    precision.reduce_dtype =
        draws.pick({Dtype::kFloat, Dtype::kFloat, Dtype::kBFloat16, Dtype::kHalf, Dtype::kDouble});
  }
  if (draws.chance(30)) precision.buffer_dtype = draws.pick({Dtype::kBFloat16, Dtype::kDouble});
  return precision;
}

// Outside of grad mode a view of a list's entry has the entry's dtype, not the
// members'; and what is written to a member is rounded to the parameter's dtype when it
// goes to the shard, which may be after the next read, so it is to need no rounding.
void draw_precision(Draws& draws, Program& program) {
  if (!draws.chance(40)) return;
  const auto of_all = draw_precision_of_unit(draws);
  const bool alike = draws.chance(50);
  for (auto& action : program.actions) {
    if (action.kind == ActionKind::kWriteMember) action.value = action.value > 1 ? 2 : 0.5;
  }
  for_each_node(program.root, [&](Node& node) {
    if (node.is_unit) node.unit.precision = alike ? of_all : draw_precision_of_unit(draws);
    for (auto& param : node.params) param.in_list = false;
  });
}

// What is written to a member is to need no rounding, as with other dtypes. Outside of
// grad mode what reads entries reads the shards' values.
void draw_codecs(Draws& draws, Program& program) {
  if (program.tensor_ranks > 0 || !draws.chance(25)) return;
  for (auto& action : program.actions) {
    if (action.kind == ActionKind::kWriteMember) action.value = action.value > 1 ? 2 : 0.5;
  }
  for_each_node(program.root, [&](Node& node) {
    if (node.is_unit && draws.chance(70))
      node.unit.precision.codec = draws.pick({Code::kMxfp8, Code::kMxint8});
    for (auto& param : node.params) param.in_list = param.by_columns = param.penalised = false;
  });
}

void draw_buffers(Draws& draws, Program& program) {
  for_each_node(program.root, [&](Node& node) { node.has_buffer = draws.chance(20); });
}

void draw_offload(Draws& draws, Program& program) {
  if (!draws.chance(15)) return;
  for_each_node(program.root,
                [&](Node& node) { node.unit.offload = node.is_unit && draws.chance(70); });
}

void draw_placements(Draws& draws, Program& program) {
  for_each_node(program.root, [&](Node& node) {
    for (auto& param : node.params)
      param.by_columns = param.use == Use::kMatmul && draws.chance(30);
  });
  if (program.tensor_ranks > 0 || !draws.chance(40)) return;
  for_each_node(program.root, [&](Node& node) {
    for (auto& param : node.params) {
      for (int count = draws.chance(40) ? draws.between(1, 4) : 0; count > 0; --count)
        param.weights.push_back(draws.pick({0, 0, 1, 1, 2, 5}));
    }
  });
}

void draw_deferral(Draws& draws, Program& program) { program.deferred = draws.chance(20); }

void draw_custom_collectives(Draws& draws, Program& program) {
  if (!draws.chance(30)) return;
  for_each_node(program.root, [&](Node& node) {
    if (!node.is_unit) return;
    node.unit.custom_gather = draws.chance(60);
    node.unit.custom_reduction = draws.chance(60);
  });
}

// Not where units cast: outside of grad mode an entry has its own dtype, not the
// member's.
void draw_readings(Draws& draws, Program& program) {
  if (casts_members(program)) return;
  program.weighs_entries = draws.chance(40);
  for_each_node(program.root, [&](Node& node) {
    for (auto& param : node.params) {
      if (draws.chance(20))
        param.reading = draws.pick({Reading::kProduct, Reading::kStatistics, Reading::kSlice});
    }
  });
}

void draw_prefetch_time(Draws& draws, Program& program) {
  program.prefetch_after_gradients = draws.chance(30);
}

}  // namespace

void draw_options(Draws& draws, Program& program) {
  draw_replicas(draws, program);
  draw_halves(draws, program);
  draw_precision(draws, program);
  draw_placements(draws, program);
  draw_codecs(draws, program);
  draw_deferral(draws, program);
  draw_custom_collectives(draws, program);
  draw_prefetch_time(draws, program);
  draw_buffers(draws, program);
  draw_offload(draws, program);
  draw_readings(draws, program);
  draw_outer(draws, program);
}

}  // namespace fsdp::testing
