#include "tests/fully_shard/random_programs/draw_model.h"

#include <optional>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int kMaxNodes = 7;

class ModelDrawing {
 public:
  ModelDrawing(Draws& draws, Program& program) : draws_(draws), program_(program) {}

  ModelSize run() {
    draw_modules();
    draw_ties();
    draw_prefetch_lists();
    return size_;
  }

 private:
  // One trainable matrix is used in every forward, in a unit, so that every backward is
  // one of sharded parameters.
  void draw_modules() {
    auto& root = program_.root;
    root.id = size_.nodes++;
    root.is_unit = draws_.chance(85);
    draw_params(root);
    draw_children(root, 1);
    if (root.is_unit) {
      add_anchor(root);
      draw_unit(root);
      return;
    }
    auto& anchored = root.children.emplace_back();
    anchored.id = size_.nodes++;
    anchored.is_unit = true;
    add_anchor(anchored);
    draw_unit(anchored);
  }

  void add_anchor(Node& node) {
    node.params.push_back(
        {.id = size_.params++, .use = Use::kMatmul, .rows = draws_.between(1, 9), .anchor = true});
  }

  void draw_children(Node& parent, int depth) {
    const int count = depth == 1 ? draws_.between(1, 3) : draws_.between(0, 2);
    for (int i = 0; i < count && size_.nodes < kMaxNodes; ++i) {
      Node node{.id = size_.nodes++};
      node.is_unit = draws_.chance(75);
      node.joins_previous =
          node.is_unit && i > 0 && parent.children.back().is_unit && draws_.chance(25);
      node.calls = draws_.chance(15) ? 2 : 1;
      node.checkpoint = draws_.chance(20);
      node.conditional = draws_.chance(15);
      node.no_grad = draws_.chance(8);
      draw_params(node);
      if (node.is_unit) draw_unit(node);
      if (depth < 3) draw_children(node, depth + 1);
      parent.children.push_back(std::move(node));
    }
  }

  void draw_params(Node& node) {
    const int count = draws_.between(0, 3);
    for (int i = 0; i < count; ++i) {
      ParamSpec param{.id = size_.params++};
      param.use = draws_.pick({Use::kMatmul, Use::kMatmul, Use::kMatmul, Use::kBias, Use::kBias,
                               Use::kGain, Use::kGain, Use::kMasked, Use::kNoGrad, Use::kUnused});
      param.rows = draws_.chance(8) ? 0 : draws_.between(1, 9);
      param.dtype = draws_.pick(
          {Dtype::kFloat, Dtype::kFloat, Dtype::kFloat, Dtype::kDouble, Dtype::kBFloat16});
      param.frozen = draws_.chance(12);
      param.ignored = draws_.chance(8);
      param.in_list = draws_.chance(15);
      param.penalised = param.use != Use::kUnused && draws_.chance(10);
      node.params.push_back(param);
    }
  }

  void draw_unit(Node& node) {
    auto& unit = node.unit;
    unit.reshard_after_forward =
        draws_.pick<std::optional<bool>>({std::nullopt, std::nullopt, true, false});
    unit.reshard_after_backward = !draws_.chance(15);
    unit.unshard_in_backward = !draws_.chance(10);
    if (draws_.chance(15)) unit.divide_factor = draws_.pick({0.5, 1.0, 2.0, 8.0});
  }

  // Only where the root is a unit: fully_shard does not see the registry slots of modules
  // outside all units.
  void draw_ties() {
    if (!program_.root.is_unit || !draws_.chance(35)) return;
    std::vector<ParamSpec> candidates;
    std::vector<Node*> nodes;
    for_each_node(program_.root, [&](Node& node) {
      nodes.push_back(&node);
      for (const auto& param : node.params) {
        if (param.use != Use::kUnused && param.use != Use::kNoGrad) candidates.push_back(param);
      }
    });
    const int count = draws_.between(1, 2);
    for (int i = 0; i < count && !candidates.empty(); ++i) {
      auto param = draws_.pick(candidates);
      param.tied_to = param.id;
      param.anchor = false;
      param.id = size_.params++;
      draws_.pick(nodes)->params.push_back(param);
    }
  }

  void draw_prefetch_lists() {
    if (!draws_.chance(25)) return;
    std::vector<int> units;
    for_each_node(program_.root, [&](Node& node) {
      if (node.is_unit) units.push_back(node.id);
    });
    for_each_node(program_.root, [&](Node& node) {
      if (!node.is_unit) return;
      for (auto* list : {&node.unit.forward_prefetch, &node.unit.backward_prefetch}) {
        if (!draws_.chance(40)) continue;
        for (int i = draws_.between(1, 2); i > 0; --i) list->push_back(draws_.pick(units));
      }
    });
  }

  Draws& draws_;
  Program& program_;
  ModelSize size_;
};

}  // namespace

ModelSize draw_model(Draws& draws, Program& program) { return ModelDrawing(draws, program).run(); }

}  // namespace fsdp::testing
