#include "tests/fully_shard/random_programs/program_shrink.h"

#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

class Simpler {
 public:
  explicit Simpler(const Program& program) : program_(program) {}

  std::vector<Program> run() {
    for (size_t i = 0; i < program_.actions.size(); ++i) {
      offer([i](Program& p) { p.actions.erase(p.actions.begin() + static_cast<int64_t>(i)); });
    }
    std::vector<int> ids;
    for_each_node(program_.root, [&ids](const Node& node) { ids.push_back(node.id); });
    for (const int id : ids) offer_removals(id);
    for (const int id : ids) offer_plainer(id);
    offer([](Program& p) { p.transport = ProgramTransport::kTestBackend; });
    offer([](Program& p) { p.evict = false; });
    offer([](Program& p) { p.deferred = false; });
    offer([](Program& p) { p.prefetch_after_gradients = false; });
    offer([](Program& p) { p.weighs_entries = false; });
    offer([](Program& p) { p.optimizer = Optimizer::kSgd; });
    offer([](Program& p) { p.outer = Outer::kReplicate; });
    offer([](Program& p) {
      p.replicas = 1;
      p.outer = Outer::kReplicate;
    });
    if (program_.tensor_ranks > 2) offer([](Program& p) { --p.tensor_ranks; });
    if (program_.world > 2 && program_.replicas == 1) offer([](Program& p) { --p.world; });
    if (program_.width > 1) offer([](Program& p) { p.width = p.width > 4 ? 4 : p.width - 1; });
    for (size_t i = 0; i < program_.actions.size(); ++i) {
      if (!runs_backward(program_.actions[i].kind)) continue;
      offer([i](Program& p) { p.actions[i].kind = ActionKind::kTrain; });
    }
    return std::move(candidates_);
  }

 private:
  static bool has_anchor(const Node& root) {
    bool found = false;
    for_each_node(root, [&found](const Node& node) {
      for (const auto& param : node.params) found |= param.anchor;
    });
    return found;
  }

  static Node& node_of(Program& program, int id) {
    Node* found = nullptr;
    for_each_node(program.root, [&](Node& node) {
      if (node.id == id) found = &node;
    });
    return *found;
  }

  template <class Change>
  void offer(const Change& change) {
    auto candidate = program_;
    change(candidate);
    if (has_anchor(candidate.root) && to_string(candidate) != to_string(program_)) {
      candidates_.push_back(std::move(candidate));
    }
  }

  void offer_removals(int id) {
    const auto& node = node_of(program_, id);
    for (size_t i = 0; i < node.children.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      offer([=](Program& p) {
        auto& children = node_of(p, id).children;
        children.erase(children.begin() + at);
      });
    }
    for (size_t i = 0; i < node.params.size(); ++i) {
      offer([=](Program& p) {
        auto& params = node_of(p, id).params;
        params.erase(params.begin() + static_cast<int64_t>(i));
      });
    }
  }

  void offer_plainer(int id) {
    offer([id](Program& p) { node_of(p, id).is_unit = node_of(p, id).joins_previous = false; });
    offer([id](Program& p) { node_of(p, id).joins_previous = false; });
    offer([id](Program& p) { node_of(p, id).unit = {}; });
    offer([id](Program& p) {
      node_of(p, id).unit.forward_prefetch = node_of(p, id).unit.backward_prefetch = {};
    });
    offer([id](Program& p) { node_of(p, id).unit.reshard_after_forward = {}; });
    offer([id](Program& p) { node_of(p, id).unit.to_halves = false; });
    offer([id](Program& p) { node_of(p, id).unit.precision = {}; });
    offer([id](Program& p) { node_of(p, id).unit.precision.codec.reset(); });
    offer([id](Program& p) { node_of(p, id).unit.precision.param_dtype.reset(); });
    offer([id](Program& p) { node_of(p, id).unit.precision.reduce_dtype.reset(); });
    offer([id](Program& p) { node_of(p, id).unit.precision.buffer_dtype.reset(); });
    offer([id](Program& p) { node_of(p, id).unit.offload = false; });
    offer([id](Program& p) { node_of(p, id).has_buffer = false; });
    offer([id](Program& p) { node_of(p, id).unit.custom_gather = false; });
    offer([id](Program& p) { node_of(p, id).unit.custom_reduction = false; });
    offer([id](Program& p) { node_of(p, id).calls = 1; });
    offer([id](Program& p) { node_of(p, id).checkpoint = false; });
    offer([id](Program& p) { node_of(p, id).conditional = false; });
    offer([id](Program& p) { node_of(p, id).no_grad = false; });
    const auto count = node_of(program_, id).params.size();
    for (size_t i = 0; i < count; ++i) {
      offer([=](Program& p) { node_of(p, id).params[i].tied_to = -1; });
      offer([=](Program& p) { node_of(p, id).params[i].dtype = Dtype::kFloat; });
      offer([=](Program& p) { node_of(p, id).params[i].frozen = false; });
      offer([=](Program& p) { node_of(p, id).params[i].ignored = false; });
      offer([=](Program& p) { node_of(p, id).params[i].in_list = false; });
      offer([=](Program& p) { node_of(p, id).params[i].penalised = false; });
      offer([=](Program& p) { node_of(p, id).params[i].reading = Reading::kNone; });
      offer([=](Program& p) { node_of(p, id).params[i].by_columns = false; });
      offer([=](Program& p) { node_of(p, id).params[i].weights.clear(); });
      offer([=](Program& p) { node_of(p, id).params[i].placement.reset(); });
      offer([=](Program& p) {
        auto& placement = node_of(p, id).params[i].placement;
        if (placement && placement->is_shard()) placement = Shard{placement->shard_dim()};
      });
      offer([=](Program& p) { node_of(p, id).params[i].rows = 2; });
      offer([=](Program& p) { node_of(p, id).params[i].use = Use::kBias; });
    }
  }

  Program program_;
  std::vector<Program> candidates_;
};

}  // namespace

Program shrink(Program program, const std::function<bool(const Program&)>& fails, int trials) {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (auto& candidate : Simpler(program).run()) {
      if (trials-- == 0) return program;
      if (!fails(candidate)) continue;
      program = std::move(candidate);
      smaller = true;
      break;
    }
  }
  return program;
}

}  // namespace fsdp::testing
