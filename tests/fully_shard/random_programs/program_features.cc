#include "tests/fully_shard/random_programs/program_features.h"

#include "tests/fully_shard/random_programs/program_traits.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::testing {
namespace {

using NodeTest = std::function<bool(const Node&)>;
using ParamTest = std::function<bool(const ParamSpec&)>;
using ActionTest = std::function<bool(const Action&)>;

Feature node_feature(std::string name, NodeTest test) {
  return {std::move(name), [test = std::move(test)](const Program& program) {
            bool found = false;
            for_each_node(program.root, [&](const Node& node) { found |= test(node); });
            return found;
          }};
}

Feature unit_feature(std::string name, std::function<bool(const UnitSpec&)> test) {
  return node_feature(std::move(name), [test = std::move(test)](const Node& node) {
    return node.is_unit && !node.joins_previous && test(node.unit);
  });
}

Feature dtype_feature(std::string name, Dtype dtype, std::optional<Dtype> PrecisionSpec::*of) {
  return unit_feature(std::move(name),
                      [=](const UnitSpec& unit) { return unit.precision.*of == dtype; });
}

// Of parameters that are sharded and not tied to another.
Feature param_feature(std::string name, ParamTest test) {
  return node_feature(std::move(name), [test = std::move(test)](const Node& node) {
    return std::any_of(node.params.begin(), node.params.end(), [&](const ParamSpec& param) {
      return !param.ignored && param.tied_to < 0 && test(param);
    });
  });
}

Feature action_feature(std::string name, ActionTest test) {
  return {std::move(name), [test = std::move(test)](const Program& program) {
            return std::any_of(program.actions.begin(), program.actions.end(), test);
          }};
}

Feature action_feature(std::string name, ActionKind kind) {
  return action_feature(std::move(name),
                        [kind](const Action& action) { return action.kind == kind; });
}

Feature program_feature(std::string name, std::function<bool(const Program&)> has) {
  return {std::move(name), std::move(has)};
}

Feature transport_feature(std::string name, ProgramTransport transport) {
  return program_feature(std::move(name), [transport](const Program& program) {
    return program.transport == transport;
  });
}

// Programs that do this where no gradients are recorded, in the entry's own dtype.
Feature entry_feature(std::string name, ParamTest test) {
  const auto has = param_feature("", std::move(test)).has;
  return program_feature(std::move(name), [has](const Program& program) {
    return computes_without_gradients(program) && !casts_members(program) && has(program);
  });
}

std::vector<Feature> entry_features() {
  const auto reads = [](Reading reading) {
    return [reading](const ParamSpec& param) { return param.reading == reading; };
  };
  const auto in_inference_mode = action_feature("", ActionKind::kInference).has;
  return {
      entry_feature("without gradients, a product of a registry entry", reads(Reading::kProduct)),
      entry_feature("without gradients, statistics of a registry entry",
                    reads(Reading::kStatistics)),
      entry_feature("without gradients, a slice of a registry entry", reads(Reading::kSlice)),
      entry_feature(
          "without gradients, a registry entry of columns",
          [](const ParamSpec& p) { return p.reading != Reading::kNone && sharded_dim(p) == 1; }),
      entry_feature("without gradients, a registry entry alone", reads_entry_alone),
      program_feature("a frozen registry entry alone, with gradients",
                      [](const Program& p) {
                        return !casts_members(p) && param_feature("", [](const ParamSpec& q) {
                                                      return q.frozen && reads_entry_alone(q);
                                                    }).has(p);
                      }),
      program_feature("in InferenceMode, a registry entry",
                      [=](const Program& p) {
                        return in_inference_mode(p) && param_feature("", [](const ParamSpec& q) {
                                                         return q.reading != Reading::kNone;
                                                       }).has(p);
                      }),
      program_feature("a metric with the norms of all registry entries",
                      [](const Program& p) {
                        return p.weighs_entries &&
                               std::any_of(p.actions.begin(), p.actions.end(), [](const auto& a) {
                                 return a.kind == ActionKind::kEvaluate ||
                                        a.kind == ActionKind::kInference;
                               });
                      }),
  };
}

std::vector<Feature> model_features() {
  return {
      program_feature("units nested two deep",
                      [](const Program& p) { return unit_depth(p.root) == 2; }),
      program_feature("units nested three deep or more",
                      [](const Program& p) { return unit_depth(p.root) >= 3; }),
      program_feature("the root is no unit", [](const Program& p) { return !p.root.is_unit; }),
      node_feature("several modules as one unit", [](const Node& n) { return n.joins_previous; }),
      node_feature("a module called twice in one forward",
                   [](const Node& n) { return n.calls > 1; }),
      program_feature("a parameter tied within a unit",
                      [](const Program& p) { return has_tie(p, false); }),
      program_feature("a parameter tied across units",
                      [](const Program& p) { return has_tie(p, true); }),
      param_feature("a frozen parameter", [](const ParamSpec& p) { return p.frozen; }),
      param_feature("a parameter unused on all ranks",
                    [](const ParamSpec& p) { return p.use == Use::kUnused; }),
      param_feature("a parameter times zero on some ranks",
                    [](const ParamSpec& p) { return p.use == Use::kMasked; }),
      node_feature("a branch on the step's condition", [](const Node& n) { return n.conditional; }),
      node_feature("a module under no_grad", [](const Node& n) { return n.no_grad; }),
      param_feature("a parameter under no_grad",
                    [](const ParamSpec& p) { return p.use == Use::kNoGrad; }),
      param_feature("a penalty through named_parameters()",
                    [](const ParamSpec& p) { return p.penalised; }),
      param_feature("a ParameterList", [](const ParamSpec& p) { return p.in_list; }),
      node_feature("activation checkpointing", [](const Node& n) { return n.checkpoint; }),
      node_feature("an ignored parameter",
                   [](const Node& n) {
                     return std::any_of(n.params.begin(), n.params.end(),
                                        [](const auto& p) { return p.ignored; });
                   }),
      program_feature("a shard of uneven size",
                      [](const Program& p) {
                        return p.world > 1 && param_feature("", [&](const ParamSpec& q) {
                                                return rows_of(p, q) % p.world;
                                              }).has(p);
                      }),
      program_feature("an empty shard",
                      [](const Program& p) {
                        return param_feature("",
                                             [&](const ParamSpec& q) {
                                               return rows_of(p, q) > 0 && rows_of(p, q) < p.world;
                                             })
                            .has(p);
                      }),
      param_feature("a matrix sharded along dimension 1",
                    [](const ParamSpec& p) { return sharded_dim(p) == 1; }),
      program_feature("a matrix sharded along dimension 1 into uneven parts",
                      [](const Program& p) {
                        return p.width % shards_of(p) > 0 &&
                               param_feature("", [](const ParamSpec& q) {
                                 return sharded_dim(q) == 1;
                               }).has(p);
                      }),
      param_feature("a parameter in parts of stated sizes",
                    [](const ParamSpec& p) { return !p.weights.empty(); }),
      param_feature("a parameter of no elements",
                    [](const ParamSpec& p) { return p.rows == 0 && p.use != Use::kBias; }),
      node_feature("mixed dtypes in one unit", mixes_dtypes),
      param_feature("double", [](const ParamSpec& p) { return p.dtype == Dtype::kDouble; }),
      param_feature("bfloat16", [](const ParamSpec& p) { return p.dtype == Dtype::kBFloat16; }),
  };
}

std::vector<Feature> option_features() {
  return {
      unit_feature("reshard_after_forward unset",
                   [](const UnitSpec& u) { return !u.reshard_after_forward; }),
      unit_feature("reshard_after_forward = true",
                   [](const UnitSpec& u) { return u.reshard_after_forward == true; }),
      unit_feature("reshard_after_forward = false",
                   [](const UnitSpec& u) { return u.reshard_after_forward == false; }),
      unit_feature("reshard_after_forward = to_world(2)",
                   [](const UnitSpec& u) { return u.to_halves; }),
      unit_feature("set_reshard_after_backward(false)",
                   [](const UnitSpec& u) { return !u.reshard_after_backward; }),
      unit_feature("set_unshard_in_backward(false)",
                   [](const UnitSpec& u) { return !u.unshard_in_backward; }),
      unit_feature("set_gradient_divide_factor",
                   [](const UnitSpec& u) { return u.divide_factor != 0; }),
      unit_feature("set_custom_all_gather", [](const UnitSpec& u) { return u.custom_gather; }),
      unit_feature("set_custom_reduce_scatter",
                   [](const UnitSpec& u) { return u.custom_reduction; }),
      unit_feature("an explicit forward prefetch list",
                   [](const UnitSpec& u) { return !u.forward_prefetch.empty(); }),
      unit_feature("an explicit backward prefetch list",
                   [](const UnitSpec& u) { return !u.backward_prefetch.empty(); }),
      program_feature("BackwardPrefetch::kPost",
                      [](const Program& p) { return p.prefetch_after_gradients; }),
      program_feature("deferred_init", [](const Program& p) { return p.deferred; }),
      transport_feature("the test's own backend", ProgramTransport::kTestBackend),
      transport_feature("peer memory, in place", ProgramTransport::kInPlace),
      transport_feature("peer memory, copies", ProgramTransport::kCopies),
      transport_feature("Gloo", ProgramTransport::kGloo),
      program_feature("every group emptied and poisoned after every operator",
                      [](const Program& p) { return p.evict; }),
      dtype_feature("param_dtype = kDouble", Dtype::kDouble, &PrecisionSpec::param_dtype),
      dtype_feature("param_dtype = kFloat", Dtype::kFloat, &PrecisionSpec::param_dtype),
      dtype_feature("param_dtype = kBFloat16", Dtype::kBFloat16, &PrecisionSpec::param_dtype),
      dtype_feature("param_dtype = kHalf", Dtype::kHalf, &PrecisionSpec::param_dtype),
      dtype_feature("reduce_dtype = kFloat", Dtype::kFloat, &PrecisionSpec::reduce_dtype),
      dtype_feature("reduce_dtype = kBFloat16", Dtype::kBFloat16, &PrecisionSpec::reduce_dtype),
      dtype_feature("reduce_dtype = kHalf", Dtype::kHalf, &PrecisionSpec::reduce_dtype),
      dtype_feature("reduce_dtype = kDouble", Dtype::kDouble, &PrecisionSpec::reduce_dtype),
      unit_feature("buffer_dtype", [](const UnitSpec& u) { return !!u.precision.buffer_dtype; }),
      program_feature("units of different precision", mixes_precisions),
      unit_feature("gather_codec_fn", [](const UnitSpec& u) { return !!u.precision.codec; }),
      unit_feature("offload_policy", [](const UnitSpec& u) { return u.offload; }),
      program_feature("world 1", [](const Program& p) { return p.world == 1; }),
      program_feature("world 2", [](const Program& p) { return p.world == 2; }),
      program_feature("world 3", [](const Program& p) { return p.world == 3; }),
      program_feature("world 4", [](const Program& p) { return p.world == 4; }),
      program_feature("hybrid sharding, each rank a replica",
                      [](const Program& p) { return p.replicas > 1 && p.replicas == p.world; }),
      program_feature("hybrid sharding, two replicas of two shards",
                      [](const Program& p) { return p.replicas == 2 && p.world == 4; }),
      program_feature("hybrid sharding of the optimizer",
                      [](const Program& p) { return p.outer == Outer::kShardOptimizer; }),
      program_feature("SGD", [](const Program& p) { return p.optimizer == Optimizer::kSgd; }),
      program_feature("SGD with momentum",
                      [](const Program& p) { return p.optimizer == Optimizer::kMomentum; }),
      program_feature("Adam", [](const Program& p) { return p.optimizer == Optimizer::kAdam; }),
      program_feature("AdamW", [](const Program& p) { return p.optimizer == Optimizer::kAdamW; }),
  };
}

std::vector<Feature> action_features() {
  return {
      program_feature("frozen later",
                      [](const Program& p) {
                        return freezes_later(p, ActionKind::kFreeze, /*frozen_before=*/false);
                      }),
      program_feature("unfrozen later",
                      [](const Program& p) {
                        return freezes_later(p, ActionKind::kUnfreeze, /*frozen_before=*/true);
                      }),
      action_feature("one forward, one backward", ActionKind::kTrain),
      action_feature("two forwards before one backward", ActionKind::kSeveralForwards),
      action_feature("two losses, two backwards with retain_graph", ActionKind::kSeveralBackwards),
      action_feature("two forwards, then their backwards", ActionKind::kInterleaved),
      action_feature("an evaluation between forward and backward",
                     ActionKind::kEvaluateBeforeBackward),
      action_feature("an evaluation under no_grad", ActionKind::kEvaluate),
      action_feature("an evaluation in InferenceMode", ActionKind::kInference),
      program_feature("accumulation without synchronisation", accumulates_without_sync),
      action_feature(
          "one unit's synchronisation off",
          [](const Action& a) { return a.kind == ActionKind::kSetSync && a.target >= 0; }),
      action_feature("sums over the shards kept", ActionKind::kSetAllReduce),
      program_feature("gradients accumulating over steps", accumulates_over_steps),
      action_feature("an exception in forward", ActionKind::kThrowInForward),
      action_feature("an exception in backward", ActionKind::kThrowInBackward),
      action_feature("a write to a member", ActionKind::kWriteMember),
      action_feature("a write to a registry entry", ActionKind::kWriteEntry),
      action_feature("unshard() by hand", ActionKind::kUnshard),
      action_feature("unshard_async() by hand", ActionKind::kUnshardAsync),
      action_feature("reshard() by hand", ActionKind::kReshard),
      action_feature("clip_grad_norm_", ActionKind::kClip),
      action_feature("an optimizer step", ActionKind::kStep),
      action_feature("zero_grad", ActionKind::kZeroGrad),
      action_feature("zero_grad in place", ActionKind::kZeroGradInPlace),
  };
}

}  // namespace

const std::vector<Feature>& features() {
  static const auto all = [] {
    auto list = model_features();
    for (auto& more : {entry_features(), option_features(), action_features()})
      list.insert(list.end(), more.begin(), more.end());
    return list;
  }();
  return all;
}

}  // namespace fsdp::testing
