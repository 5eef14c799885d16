#include "tests/fully_shard/programs/random_program.h"

#include <algorithm>
#include <random>
#include <sstream>

namespace fsdp::testing {
namespace {

constexpr int kMaxNodes = 7;

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed * 0x9e3779b97f4a7c15ULL + 1) {
    program_.seed = seed;
  }

  Program run() {
    program_.world = pick({1, 2, 2, 2, 2, 3, 3, 4});
    program_.evict = chance(20);
    program_.width = between(1, 9);
    program_.optimizer =
        pick({Optimizer::kSgd, Optimizer::kMomentum, Optimizer::kAdam, Optimizer::kAdamW});
    draw_model();
    draw_ties();
    draw_prefetch_lists();
    draw_actions();
    draw_replicas();
    draw_halves();
    draw_precision();
    draw_placements();
    return std::move(program_);
  }

 private:
  int between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
  }
  template <class T>
  const T& pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, static_cast<int>(values.size()) - 1))];
  }

  // One trainable matrix is used in every forward, in a unit, so that every backward is
  // one of sharded parameters.
  void draw_model() {
    auto& root = program_.root;
    root.id = node_count_++;
    root.is_unit = chance(85);
    draw_params(root);
    draw_children(root, 1);
    if (root.is_unit) {
      add_anchor(root);
      draw_unit(root);
      return;
    }
    auto& anchored = root.children.emplace_back();
    anchored.id = node_count_++;
    anchored.is_unit = true;
    add_anchor(anchored);
    draw_unit(anchored);
  }

  void add_anchor(Node& node) {
    node.params.push_back(
        {.id = param_count_++, .use = Use::kMatmul, .rows = between(1, 9), .anchor = true});
  }

  void draw_children(Node& parent, int depth) {
    const int count = depth == 1 ? between(1, 3) : between(0, 2);
    for (int i = 0; i < count && node_count_ < kMaxNodes; ++i) {
      Node node{.id = node_count_++};
      node.is_unit = chance(75);
      node.joins_previous = node.is_unit && i > 0 && parent.children.back().is_unit && chance(25);
      node.calls = chance(15) ? 2 : 1;
      node.checkpoint = chance(20);
      node.conditional = chance(15);
      node.no_grad = chance(8);
      draw_params(node);
      if (node.is_unit) draw_unit(node);
      if (depth < 3) draw_children(node, depth + 1);
      parent.children.push_back(std::move(node));
    }
  }

  void draw_params(Node& node) {
    const int count = between(0, 3);
    for (int i = 0; i < count; ++i) {
      ParamSpec param{.id = param_count_++};
      param.use = pick({Use::kMatmul, Use::kMatmul, Use::kMatmul, Use::kBias, Use::kBias,
                        Use::kGain, Use::kGain, Use::kMasked, Use::kNoGrad, Use::kUnused});
      param.rows = chance(8) ? 0 : between(1, 9);
      param.dtype =
          pick({Dtype::kFloat, Dtype::kFloat, Dtype::kFloat, Dtype::kDouble, Dtype::kBFloat16});
      param.frozen = chance(12);
      param.ignored = chance(8);
      param.in_list = chance(15);
      param.penalised = param.use != Use::kUnused && chance(10);
      node.params.push_back(param);
    }
  }

  void draw_unit(Node& node) {
    auto& unit = node.unit;
    unit.reshard_after_forward =
        pick<std::optional<bool>>({std::nullopt, std::nullopt, true, false});
    unit.reshard_after_backward = !chance(15);
    unit.unshard_in_backward = !chance(10);
    if (chance(15)) unit.divide_factor = pick({0.5, 1.0, 2.0, 8.0});
  }

  // Only where the root is a unit: fully_shard does not see the registry slots of modules
  // outside all units.
  void draw_ties() {
    if (!program_.root.is_unit || !chance(35)) return;
    std::vector<ParamSpec> candidates;
    std::vector<Node*> nodes;
    for_each_node(program_.root, [&](Node& node) {
      nodes.push_back(&node);
      for (const auto& param : node.params) {
        if (param.use != Use::kUnused && param.use != Use::kNoGrad) candidates.push_back(param);
      }
    });
    const int count = between(1, 2);
    for (int i = 0; i < count && !candidates.empty(); ++i) {
      auto param = pick(candidates);
      param.tied_to = param.id;
      param.anchor = false;
      param.id = param_count_++;
      pick(nodes)->params.push_back(param);
    }
  }

  void draw_prefetch_lists() {
    if (!chance(25)) return;
    std::vector<int> units;
    for_each_node(program_.root, [&](Node& node) {
      if (node.is_unit) units.push_back(node.id);
    });
    for_each_node(program_.root, [&](Node& node) {
      if (!node.is_unit) return;
      for (auto* list : {&node.unit.forward_prefetch, &node.unit.backward_prefetch}) {
        if (!chance(40)) continue;
        for (int i = between(1, 2); i > 0; --i) list->push_back(pick(units));
      }
    });
  }

  void add(Action action) {
    action.data = random_() % 1000000;
    action.condition = chance(60);
    program_.actions.push_back(action);
  }
  int any_node() { return between(0, node_count_ - 1); }
  int any_param() { return between(0, param_count_ - 1); }

  void add_backward() {
    add({.kind = pick({ActionKind::kTrain, ActionKind::kTrain, ActionKind::kTrain,
                       ActionKind::kSeveralForwards, ActionKind::kSeveralBackwards,
                       ActionKind::kInterleaved, ActionKind::kEvaluateBeforeBackward})});
  }

  void draw_between() {
    if (chance(20)) add({.kind = pick({ActionKind::kEvaluate, ActionKind::kInference})});
    if (chance(12)) {
      add({.kind = pick({ActionKind::kThrowInForward, ActionKind::kThrowInBackward}),
           .target = any_node()});
    }
    if (chance(15))
      add({.kind = pick({ActionKind::kFreeze, ActionKind::kUnfreeze}), .target = any_param()});
    if (chance(15)) {
      add({.kind = pick({ActionKind::kWriteMember, ActionKind::kWriteEntry}),
           .target = any_param(),
           .value = pick({0.5, 0.75, 1.25})});
    }
    if (chance(20)) {
      add({.kind = pick({ActionKind::kUnshard, ActionKind::kUnshardAsync, ActionKind::kReshard}),
           .target = any_node()});
    }
  }

  void draw_accumulation() {
    add({.kind = ActionKind::kSetSync, .target = chance(30) ? any_node() : -1, .flag = false});
    for (int i = between(1, 2); i > 0; --i) {
      draw_between();
      add_backward();
    }
    add({.kind = ActionKind::kSetSync, .target = -1, .flag = true});
  }

  void draw_actions() {
    const int rounds = between(1, 4);
    for (int round = 0; round < rounds; ++round) {
      draw_between();
      if (chance(20)) draw_accumulation();
      add_backward();
      draw_between();
      if (chance(15))
        add({.kind = ActionKind::kClip, .flag = chance(30), .value = pick({0.01, 1.0, 100.0})});
      if (chance(85)) add({.kind = ActionKind::kStep});
      if (chance(75))
        add({.kind = pick(
                 {ActionKind::kZeroGrad, ActionKind::kZeroGrad, ActionKind::kZeroGradInPlace})});
    }
  }

  // Some accumulations then keep sums over the shards in place of unreduced gradients.
  void draw_replicas() {
    if (program_.world == 1 || !chance(30)) return;
    program_.replicas = program_.world == 4 ? pick({2, 2, 4}) : program_.world;
    bool changed = false;
    for (auto& action : program_.actions) {
      if (action.kind != ActionKind::kSetSync) continue;
      if (!action.flag) changed = chance(50);
      if (changed) action.kind = ActionKind::kSetAllReduce;
    }
  }

  void draw_halves() {
    if (shards_of(program_) != 4) return;
    for_each_node(program_.root, [&](Node& node) {
      const bool reshards = node.is_unit && node.unit.reshard_after_forward == true;
      if (reshards) node.unit.to_halves = chance(60);
    });
  }

  // Outside of grad mode a view of a list's entry has the entry's dtype, not the
  // members'; and what is written to a member is rounded to the parameter's dtype when it
  // goes to the shard, which may be after the next read, so it is to need no rounding.
  void draw_precision() {
    program_.in_double = chance(20);
    if (!program_.in_double) return;
    for (auto& action : program_.actions) {
      if (action.kind == ActionKind::kWriteMember) action.value = action.value > 1 ? 2 : 0.5;
    }
    for_each_node(program_.root, [](Node& node) {
      for (auto& param : node.params) param.in_list = false;
    });
  }

  void draw_placements() {
    for_each_node(program_.root, [&](Node& node) {
      for (auto& param : node.params) param.by_columns = param.use == Use::kMatmul && chance(30);
    });
  }

  std::mt19937_64 random_;
  Program program_;
  int node_count_ = 0, param_count_ = 0;
};

const char* name_of(Use use) {
  constexpr const char* names[] = {"matmul", "bias", "gain", "masked", "no_grad", "unused"};
  return names[static_cast<size_t>(use)];
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"float", "double", "bfloat16"};
  return names[static_cast<size_t>(dtype)];
}

const char* name_of(Optimizer optimizer) {
  constexpr const char* names[] = {"SGD", "SGD with momentum", "Adam", "AdamW"};
  return names[static_cast<size_t>(optimizer)];
}

const char* name_of(ActionKind kind) {
  constexpr const char* names[] = {"train",
                                   "two forwards, one backward",
                                   "two losses of one forward, two backwards",
                                   "two forwards, then their backwards",
                                   "forward, evaluation, backward",
                                   "evaluate under no_grad",
                                   "evaluate in InferenceMode",
                                   "throw in forward",
                                   "throw in backward, zero_grad",
                                   "set_requires_gradient_sync",
                                   "set_requires_all_reduce",
                                   "freeze",
                                   "unfreeze",
                                   "write to member",
                                   "write to registry entry",
                                   "unshard",
                                   "unshard_async",
                                   "reshard",
                                   "clip_grad_norm_",
                                   "optimizer step",
                                   "zero_grad",
                                   "zero_grad in place"};
  return names[static_cast<size_t>(kind)];
}

void print_param(std::ostream& out, const ParamSpec& param) {
  out << "p" << param.id << " " << name_of(param.use) << " rows " << param.rows << " "
      << name_of(param.dtype);
  if (param.frozen) out << " frozen";
  if (param.ignored) out << " ignored";
  if (param.in_list) out << " in a ParameterList";
  if (param.penalised) out << " penalised";
  if (param.tied_to >= 0) out << " tied to p" << param.tied_to;
  if (param.by_columns) out << " sharded by columns";
}

void print_ids(std::ostream& out, const char* what, const std::vector<int>& ids) {
  if (ids.empty()) return;
  out << " " << what;
  for (const int id : ids) out << " n" << id;
}

void print_unit(std::ostream& out, const Node& node) {
  out << (node.joins_previous ? " unit with the one before" : " unit");
  const auto& unit = node.unit;
  if (unit.reshard_after_forward) out << " reshard_after_forward=" << *unit.reshard_after_forward;
  if (unit.to_halves) out << " to_world(2)";
  if (!unit.reshard_after_backward) out << " reshard_after_backward=0";
  if (!unit.unshard_in_backward) out << " unshard_in_backward=0";
  if (unit.divide_factor != 0) out << " divide_factor=" << unit.divide_factor;
  print_ids(out, "forward_prefetch", unit.forward_prefetch);
  print_ids(out, "backward_prefetch", unit.backward_prefetch);
}

void print_node(std::ostream& out, const Node& node, const std::string& indent) {
  out << indent << "n" << node.id;
  if (node.is_unit) print_unit(out, node);
  if (node.calls > 1) out << " called " << node.calls << " times";
  if (node.checkpoint) out << " checkpointed";
  if (node.conditional) out << " conditional";
  if (node.no_grad) out << " under no_grad";
  out << "\n";
  for (const auto& param : node.params) {
    out << indent << "  ";
    print_param(out, param);
    out << "\n";
  }
  for (const auto& child : node.children) print_node(out, child, indent + "  ");
}

void print_action(std::ostream& out, const Action& action) {
  out << "  " << name_of(action.kind);
  if (action.target >= 0) out << " " << action.target;
  if (runs_backward(action.kind) && !action.condition) out << " (condition false)";
  if (action.kind == ActionKind::kSetSync || action.kind == ActionKind::kSetAllReduce)
    out << " " << action.flag;
  if (action.kind == ActionKind::kClip)
    out << " to " << action.value << (action.flag ? " maximum norm" : "");
  if (action.kind == ActionKind::kWriteMember || action.kind == ActionKind::kWriteEntry)
    out << " times " << action.value;
  out << "\n";
}

}  // namespace

Program generate(uint64_t seed) { return Generator(seed).run(); }

std::string to_string(const Program& program) {
  std::ostringstream out;
  out << "program of seed " << program.seed << ": world " << program.world;
  if (program.replicas > 1) out << " of " << program.replicas << " replicas";
  out << ", width " << program.width << ", " << name_of(program.optimizer)
      << (program.evict ? ", evict after every operator" : "")
      << (program.in_double ? ", computed in double" : "") << "\n";
  print_node(out, program.root, "  ");
  for (const auto& action : program.actions) print_action(out, action);
  return out.str();
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

int64_t rows_of(const Program& program, const ParamSpec& param) {
  return param.use == Use::kBias ? program.width : param.rows;
}

bool runs_backward(ActionKind kind) { return kind <= ActionKind::kEvaluateBeforeBackward; }

int shards_of(const Program& program) { return program.world / program.replicas; }

}  // namespace fsdp::testing
