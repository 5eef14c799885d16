#include "tests/fully_shard/program_run.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/random_model.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

constexpr double kLearningRate = 0.01;
constexpr double kBFloat16Epsilon = 1.0 / 128;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Optimizer kind, const std::vector<Tensor>& parameters) {
  namespace optim = torch::optim;
  switch (kind) {
    case Optimizer::kSgd:
      return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(kLearningRate).weight_decay(0.01));
    case Optimizer::kMomentum:
      return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(kLearningRate).momentum(0.9).nesterov(true));
    case Optimizer::kAdam:
      return std::make_unique<optim::Adam>(parameters, optim::AdamOptions(kLearningRate));
    default:
      return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(kLearningRate).amsgrad(true));
  }
}

Tensor make_input(const Program& program, uint64_t seed, int64_t rank) {
  auto generator = at::detail::createCPUGenerator(10 * seed + static_cast<uint64_t>(rank));
  return at::randn({2, program.width}, generator, at::kFloat).set_requires_grad(true);
}

// The losses of one action, to be run backward one after another, and the inputs whose gradients they give.
struct Losses {
  std::vector<Tensor> losses, inputs;
  bool retain_graph = false;
};

Losses forward_losses(const Program& program, const RandomModel& model, const Action& action, int64_t rank) {
  const Forward forward{.rank = rank, .condition = action.condition};
  Losses result;
  const auto run = [&](uint64_t seed) {
    result.inputs.push_back(make_input(program, seed, rank));
    return model.forward(result.inputs.back(), forward);
  };
  const auto loss = [](const Tensor& output) { return output.pow(2).mean(); };
  switch (action.kind) {
    case ActionKind::kSeveralForwards: {
      const auto first = loss(run(action.data));
      result.losses = {first + loss(run(action.data + 1))};
      break;
    }
    case ActionKind::kSeveralBackwards: {
      const auto output = run(action.data);
      result.losses = {loss(output), output.sum()};
      result.retain_graph = true;
      break;
    }
    case ActionKind::kInterleaved: {
      const auto first = loss(run(action.data));
      result.losses = {loss(run(action.data + 1)), first};
      break;
    }
    case ActionKind::kEvaluateBeforeBackward: {
      result.losses = {loss(run(action.data))};
      at::NoGradGuard no_grad;
      model.forward(make_input(program, action.data + 1, rank), forward);
      break;
    }
    default:
      result.losses = {loss(run(action.data))};
  }
  return result;
}

// What one backward adds up on one rank.
struct Arrivals {
  int count = 0;
  Tensor magnitude = {};  // the sum of absolute values
  void add(const Tensor& gradient) {
    at::NoGradGuard no_grad;
    ++count;
    magnitude = magnitude.defined() ? magnitude + gradient.abs() : gradient.abs();
  }
};

// One parameter tensor, on both sides.
struct Compared {
  int id = 0;
  int unit = -1;                     // that shards it; none: local to the rank
  std::vector<ModelTensor> plain;    // per rank
  std::vector<Tensor> pending = {};  // per rank: gradients not synchronised yet
  ModelTensor sharded = {};
  std::vector<std::shared_ptr<Arrivals>> arrivals = {};  // per rank
  Tensor bound = {};                                // what the last synchronised backward may differ by
};

class SideBySide {
 public:
  SideBySide(const Program& program, int64_t rank, const DeviceMesh& mesh)
      : program_(program), rank_(rank), mesh_(mesh), sharded_(build_model(program)) {
    for (int64_t r = 0; r < program.world; ++r) plain_.push_back(build_model(program));
    collect_tensors();
    shard(program.root);
    if (program.root.is_unit) shard_together({&program.root});
    set_prefetch_lists();
    for (size_t r = 0; r < plain_.size(); ++r) {
      plain_optimizers_.push_back(make_optimizer(program.optimizer, optimized_parts(r)));
    }
    sharded_optimizer_ = make_optimizer(program.optimizer, sharded_.module().parameters());
  }

  std::optional<std::string> run() {
    for (step_ = 0; step_ < program_.actions.size(); ++step_) perform(program_.actions[step_]);
    write_members_back();
    compare_parameters("at the end");
    return difference_;
  }

 private:
  struct Chunk {
    Tensor member;
    int64_t rank = 0;
    Tensor part;  // a view of the member
  };
  struct ShardedUnit {
    std::vector<const Node*> nodes;
    FSDPModule module;
    bool synchronize = true;
  };

  // --- Building

  void collect_tensors() {
    for (const auto& [id, tensor] : sharded_.tensors) {
      auto& compared = tensors_[id];
      compared.id = id;
      compared.sharded = tensor;
      compared.pending.resize(plain_.size());
    }
    for (auto& [id, compared] : tensors_) {
      for (auto& model : plain_) {
        compared.plain.push_back(model.tensors.at(id));
        const auto arrivals = compared.arrivals.emplace_back(std::make_shared<Arrivals>());
        watch(compared.plain.back().member, arrivals);
      }
    }
  }

  static void watch(const Tensor& member, const std::shared_ptr<Arrivals>& arrivals) {
    const bool trained = member.requires_grad();
    member.set_requires_grad(true);  // hooks need it; it may be unfrozen later
    member.register_hook([arrivals](const Tensor& gradient) { arrivals->add(gradient); });
    member.set_requires_grad(trained);
  }

  // What the unsharded optimizer of rank `r` updates, tied tensors as often as they are tied. LibTorch rounds bfloat16
  // between the steps of an update or not by an element's place in its tensor, so there each chunk is a tensor of its own.
  std::vector<Tensor> optimized_parts(size_t r) {
    std::map<at::TensorImpl*, std::vector<Tensor>> parts_of;
    for (auto& [id, tensor] : tensors_) {
      const auto& member = tensor.plain[r].member;
      if (tensor.unit < 0 || member.scalar_type() != at::kBFloat16) continue;
      for (int64_t rank = 0; rank < program_.world; ++rank) {
        chunks_.push_back({member, rank, chunk(member.detach(), rank)});
        parts_of[member.unsafeGetTensorImpl()].push_back(chunks_.back().part);
      }
    }
    std::vector<Tensor> parts;
    for (const auto& parameter : plain_[r].module().parameters()) {
      const auto found = parts_of.find(parameter.unsafeGetTensorImpl());
      if (found == parts_of.end()) {
        parts.push_back(parameter);
      } else {
        parts.insert(parts.end(), found->second.begin(), found->second.end());
      }
    }
    return parts;
  }

  void hand_gradients_to_chunks() {
    for (auto& [member, rank, part] : chunks_) {
      part.mutable_grad() = member.grad().defined() ? chunk(member.grad(), rank) : Tensor();
    }
  }

  // Bottom-up, as fully_shard asks; siblings that join become one unit.
  void shard(const Node& node) {
    for (const auto& child : node.children) shard(child);
    for (size_t i = 0; i < node.children.size(); ++i) {
      if (!node.children[i].is_unit) continue;
      std::vector<const Node*> together{&node.children[i]};
      while (i + 1 < node.children.size() && node.children[i + 1].joins_previous)
        together.push_back(&node.children[++i]);
      shard_together(together);
    }
  }

  void shard_together(const std::vector<const Node*>& nodes) {
    const auto& spec = nodes.front()->unit;
    FullyShardOptions options;
    if (spec.reshard_after_forward) options.reshard_after_forward = *spec.reshard_after_forward;
    std::vector<torch::nn::Module*> modules;
    const auto number = static_cast<int>(units_.size());
    for (const auto* node : nodes) {
      modules.push_back(sharded_.blocks.at(node->id).get());
      for_each_node(*node, [&](const Node& below) { adopt(below, number, options); });
    }
    auto module = fully_shard(modules, mesh_, options);
    if (!spec.reshard_after_backward) module.set_reshard_after_backward(false, /*recurse=*/false);
    if (!spec.unshard_in_backward) module.set_unshard_in_backward(false);
    if (spec.divide_factor != 0) module.set_gradient_divide_factor(spec.divide_factor);
    units_.push_back({nodes, module});
  }

  void adopt(const Node& node, int unit, FullyShardOptions& options) {
    for (const auto& param : node.params) {
      const auto& tensor = tensor_of(program_, param);
      auto& compared = tensors_.at(tensor.id);
      if (tensor.ignored) {
        options.ignored_params.push_back(compared.sharded.member);
      } else if (compared.unit < 0) {
        compared.unit = unit;
      }
    }
  }

  int unit_of(int node_id) const {
    for (size_t i = 0; i < units_.size(); ++i) {
      for (const auto* node : units_[i].nodes) {
        if (node->id == node_id) return static_cast<int>(i);
      }
    }
    return -1;
  }

  std::vector<FSDPModule> units_of(const std::vector<int>& node_ids) const {
    std::vector<FSDPModule> modules;
    for (const int id : node_ids) {
      if (const int unit = unit_of(id); unit >= 0) modules.push_back(units_[static_cast<size_t>(unit)].module);
    }
    return modules;
  }

  void set_prefetch_lists() {
    for (auto& unit : units_) {
      const auto& spec = unit.nodes.front()->unit;
      if (!spec.forward_prefetch.empty()) unit.module.set_modules_to_forward_prefetch(units_of(spec.forward_prefetch));
      if (!spec.backward_prefetch.empty()) {
        unit.module.set_modules_to_backward_prefetch(units_of(spec.backward_prefetch));
      }
    }
  }

  // --- Comparing

  // The program goes on all the same, so that ranks stay together.
  void differ(const std::string& what) {
    if (difference_) return;
    std::ostringstream text;
    text << "action " << step_ << ": " << what;
    difference_ = text.str();
  }

  static bool same(const Tensor& a, const Tensor& b) {
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
    return at::equal(a, b) || ((a == b) | (a.isnan() & b.isnan())).all().item<bool>();  // programs may diverge
  }

  void compare(const std::string& what, const Tensor& actual, const Tensor& expected) {
    if (actual.defined() != expected.defined()) {
      return differ(what + (actual.defined() ? " is defined" : " is not defined"));
    }
    if (!actual.defined() || same(actual, expected)) return;
    std::ostringstream text;
    text << what << " is\n" << actual << "\nbut unsharded\n" << expected;
    differ(text.str());
  }

  // This rank's chunk of dimension 0.
  Tensor chunk(const Tensor& full) const { return chunk(full, rank_); }
  Tensor chunk(const Tensor& full, int64_t rank) const {
    const auto rows = full.size(0);
    const auto length = (rows + program_.world - 1) / program_.world;
    const auto first = std::min(rows, rank * length);
    return full.narrow(0, first, std::min(length, rows - first));
  }

  // Of a sharded tensor's value or gradient: its part here. Local.
  void compare_shard(const std::string& what, const Tensor& actual, const Tensor& expected, const Tensor& bound) {
    if (actual.defined() != expected.defined()) {
      return differ(what + (actual.defined() ? " is defined" : " is not defined"));
    }
    if (!actual.defined()) return;
    if (!is_dtensor(actual)) return differ(what + " is no DTensor");
    const auto local = DTensor(actual).to_local();
    const auto part = chunk(expected);
    if (local.sizes() == part.sizes() && local.scalar_type() == part.scalar_type() && bound.defined()) {
      if (((local - part).abs() <= chunk(bound)).all().item<bool>()) return;
    }
    compare(what, local, part);
  }

  std::string label(const Compared& tensor, const char* what) const {
    return std::string(what) + " of p" + std::to_string(tensor.id);
  }

  void compare_gradients() {
    for (auto& [id, tensor] : tensors_) {
      const auto what = label(tensor, "gradient");
      const auto actual = tensor.sharded.entry().grad();
      const auto expected = tensor.plain[own()].member.grad();
      if (tensor.unit < 0) {
        compare(what, actual, expected);
      } else {
        compare_shard(what, actual, expected, tensor.bound);
      }
    }
  }

  void compare_parameters(const char* when) {
    at::NoGradGuard no_grad;
    for (auto& [id, tensor] : tensors_) {
      const auto what = label(tensor, "value") + " " + when;
      const auto expected = tensor.plain[own()].member.detach();
      if (tensor.unit < 0) {
        compare(what, tensor.sharded.member, expected);
        continue;
      }
      compare_shard(what, tensor.sharded.entry().detach(), expected, /*bound=*/{});
    }
  }

  // --- Actions

  void perform(const Action& action) {
    if (runs_backward(action.kind)) return train(action);
    switch (action.kind) {
      case ActionKind::kEvaluate:
      case ActionKind::kInference:
        return evaluate(action);
      case ActionKind::kThrowInForward:
      case ActionKind::kThrowInBackward:
        return throw_inside(action);
      case ActionKind::kSetSync:
        return set_sync(action);
      case ActionKind::kFreeze:
      case ActionKind::kUnfreeze:
        return freeze(action.target, action.kind == ActionKind::kFreeze);
      case ActionKind::kWriteMember:
      case ActionKind::kWriteEntry:
        return write(action);
      case ActionKind::kClip:
        return clip(action);
      case ActionKind::kStep:
        return optimizer_step();
      case ActionKind::kZeroGrad:
      case ActionKind::kZeroGradInPlace:
        return zero_grad(action.kind == ActionKind::kZeroGrad);
      default:
        return by_hand(action);
    }
  }

  void train(const Action& action) {
    std::vector<Losses> plain;
    for (size_t r = 0; r < plain_.size(); ++r) {
      plain.push_back(forward_losses(program_, plain_[r], action, static_cast<int64_t>(r)));
    }
    auto sharded = forward_losses(program_, sharded_, action, rank_);
    const auto& mine = plain[own()];
    for (size_t i = 0; i < sharded.losses.size(); ++i) {
      compare("loss", sharded.losses[i].detach(), mine.losses[i].detach());
      const bool retain = sharded.retain_graph && i + 1 < sharded.losses.size();
      run_plain_backward(plain, i, retain);
      sharded.losses[i].backward({}, retain);
      compare_gradients();
      follow_gradients();
    }
    for (size_t i = 0; i < sharded.inputs.size(); ++i) {
      compare("gradient of the input", sharded.inputs[i].grad(), mine.inputs[i].grad());
    }
  }

  // The gradients of sharded parameters start from what is pending, so that what each rank adds is seen alone.
  void run_plain_backward(const std::vector<Losses>& plain, size_t index, bool retain) {
    std::map<int, std::vector<Tensor>> before;
    for (auto& [id, tensor] : tensors_) {
      tensor.bound.reset();
      for (size_t r = 0; r < plain_.size(); ++r) {
        auto& arrivals = *tensor.arrivals[r] = {};
        if (tensor.unit < 0) continue;
        auto& gradient = tensor.plain[r].member.mutable_grad();
        if (tensor.pending[r].defined()) arrivals.add(tensor.pending[r]);
        before[id].push_back(std::exchange(gradient, std::exchange(tensor.pending[r], {})));
      }
    }
    for (const auto& losses : plain) losses.losses[index].backward({}, retain);
    at::NoGradGuard no_grad;
    for (auto& [id, tensor] : tensors_) {
      if (tensor.unit >= 0) reduce(tensor, before[id]);
    }
  }

  void reduce(Compared& tensor, std::vector<Tensor>& before) {
    const auto& unit = units_[static_cast<size_t>(tensor.unit)];
    Tensor sum, magnitude;
    for (size_t r = 0; r < plain_.size(); ++r) {
      auto gradient = std::exchange(tensor.plain[r].member.mutable_grad(), before[r]);
      if (!unit.synchronize) {
        tensor.pending[r] = gradient;
        continue;
      }
      if (!gradient.defined()) continue;
      sum = sum.defined() ? sum + gradient : gradient.clone();
      const auto& arrived = tensor.arrivals[r]->magnitude;
      magnitude = magnitude.defined() ? magnitude + arrived : arrived;
    }
    if (!sum.defined()) return;
    const double factor = unit.nodes.front()->unit.divide_factor;
    const double divisor = factor != 0 ? factor : static_cast<double>(program_.world);
    if (divisor != 1) sum.div_(divisor);
    const auto total = before.front().defined() ? before.front() + sum : sum;
    for (auto& plain : tensor.plain) plain.member.mutable_grad() = total.clone();
    auto added = magnitude / divisor;
    if (before.front().defined()) added += before.front().abs();
    set_bound(tensor, magnitude, added, divisor);
  }

  // Beyond two ranks a sum may be in another order; so may it be where a parameter has several gradients to add up (of
  // nested backwards, or of earlier ones without synchronisation), which may leave in several reductions.
  // `added`: the sum of the absolute values that the gradient is the sum of.
  void set_bound(Compared& tensor, const Tensor& magnitude, const Tensor& added, double divisor) const {
    int arrivals = 1;
    for (const auto& rank : tensor.arrivals) arrivals = std::max(arrivals, rank->count);
    if (program_.world <= 2 && arrivals == 1) return;
    const int terms = program_.world * arrivals - 1;
    const double eps = magnitude.scalar_type() == at::kDouble  ? std::numeric_limits<double>::epsilon()
                       : magnitude.scalar_type() == at::kFloat ? std::numeric_limits<float>::epsilon()
                                                               : kBFloat16Epsilon;
    tensor.bound = magnitude * (terms * eps / std::min(divisor, 1.0)) + added * (arrivals * eps);
  }

  // The sharded gradients themselves where they may be rounded otherwise, so that this does not spread.
  void follow_gradients() {
    at::NoGradGuard no_grad;
    for (auto& [id, tensor] : tensors_) {
      if (!tensor.bound.defined()) continue;
      const auto gradient = tensor.sharded.entry().grad();
      if (!gradient.defined()) continue;
      const auto full = DTensor(gradient).full_tensor();
      for (auto& plain : tensor.plain) plain.member.mutable_grad() = full.clone();
      tensor.bound.reset();
    }
  }

  void evaluate(const Action& action) {
    const Forward forward{.rank = rank_, .condition = action.condition};
    const auto input = make_input(program_, action.data, rank_);
    const auto both = [&] {
      const auto expected = plain_[own()].forward(input, forward);
      compare("output of evaluation", sharded_.forward(input, forward), expected);
    };
    if (action.kind == ActionKind::kInference) {
      c10::InferenceMode inference;
      both();
    } else {
      at::NoGradGuard no_grad;
      both();
    }
  }

  // True when the exception came.
  bool throws(const RandomModel& model, const Action& action, int64_t rank) {
    Forward forward{.rank = rank, .condition = action.condition};
    (action.kind == ActionKind::kThrowInForward ? forward.throw_at : forward.throw_backward_at) = action.target;
    try {
      const auto output = model.forward(make_input(program_, action.data, rank), forward);
      if (action.kind == ActionKind::kThrowInBackward) output.sum().backward();
    } catch (const PlannedException&) {
      return true;
    }
    return false;
  }

  void throw_inside(const Action& action) {
    bool expected = false;
    for (size_t r = 0; r < plain_.size(); ++r) expected = throws(plain_[r], action, static_cast<int64_t>(r));
    if (throws(sharded_, action, rank_) != expected) differ("the planned exception came on one side only");
    if (action.kind == ActionKind::kThrowInForward) return;
    for (auto& unit : units_) unit.module.zero_pending_gradients(/*recurse=*/false);
    for (auto& [id, tensor] : tensors_) tensor.pending.assign(plain_.size(), {});
    sharded_.module().zero_grad();
    for (auto& model : plain_) model.module().zero_grad();
    compare_gradients();
  }

  void set_sync(const Action& action) {
    for (size_t i = 0; i < units_.size(); ++i) {
      if (action.target >= 0 && static_cast<int>(i) != unit_of(action.target)) continue;
      units_[i].synchronize = action.flag;
      units_[i].module.set_requires_gradient_sync(action.flag, /*recurse=*/false);
    }
  }

  void freeze(int id, bool frozen) {
    const auto* param = find_param(program_, id);
    if (param == nullptr) return;
    const auto& spec = tensor_of(program_, *param);
    auto& tensor = tensors_.at(spec.id);
    if (spec.anchor) return;
    for (auto& plain : tensor.plain) plain.member.set_requires_grad(!frozen);
    tensor.sharded.entry().set_requires_grad(!frozen);
  }

  void write(const Action& action) {
    const auto* param = find_param(program_, action.target);
    if (param == nullptr) return;
    at::NoGradGuard no_grad;
    auto& tensor = tensors_.at(tensor_of(program_, *param).id);
    for (auto& plain : tensor.plain) plain.member.mul_(action.value);
    if (action.kind == ActionKind::kWriteMember) {
      tensor.sharded.member.mul_(action.value);
      member_written_ = true;
    } else {
      tensor.sharded.entry().mul_(action.value);
    }
  }

  void by_hand(const Action& action) {
    const int number = unit_of(action.target);
    if (number < 0) return;
    auto& module = units_[static_cast<size_t>(number)].module;
    if (action.kind == ActionKind::kUnshard) module.unshard();
    if (action.kind == ActionKind::kUnshardAsync) module.unshard_async();
    if (action.kind == ActionKind::kReshard) module.reshard();
  }

  // Gradients of local parameters differ from rank to rank and have no common norm: they are left out.
  void clip(const Action& action) {
    const double p = action.flag ? std::numeric_limits<double>::infinity() : 2.0;
    at::NoGradGuard no_grad;
    std::vector<Tensor> entries;
    double expected = 0, precision = 1e-5;
    for (auto& [id, tensor] : tensors_) {
      if (tensor.unit < 0) continue;
      entries.push_back(tensor.sharded.entry());
      const auto gradient = tensor.plain[own()].member.grad();
      if (!gradient.defined() || gradient.numel() == 0) continue;
      if (gradient.scalar_type() == at::kBFloat16) precision = 0.05;
      const double norm = gradient.to(at::kDouble).norm(p).item<double>();
      expected = action.flag ? std::max(expected, norm) : std::hypot(expected, norm);
    }
    const double norm = clip_grad_norm_(entries, action.value, p).item().toDouble();
    if (std::abs(norm - expected) > precision * expected) {
      differ("clip_grad_norm_ gave " + std::to_string(norm) + " but unsharded " + std::to_string(expected));
    }
    const double scale = std::min(1.0, action.value / (expected + 1e-6));
    for (auto& [id, tensor] : tensors_) {
      if (tensor.unit < 0 || !tensor.plain[own()].member.grad().defined()) continue;
      auto& gradient = tensor.plain[own()].member.mutable_grad();
      gradient.mul_(scale);
      tensor.bound = gradient.abs() * (2 * precision) + 1e-30;
    }
    compare_gradients();
    follow_gradients();
  }

  // A write to a member reaches the shard, which weight decay reads, at the next forward or reshard.
  void optimizer_step() {
    write_members_back();
    hand_gradients_to_chunks();
    for (auto& optimizer : plain_optimizers_) optimizer->step();
    sharded_optimizer_->step();
    compare_parameters("after the optimizer");
  }

  // Only then: resharding in between would hide a copy that stayed behind its shard.
  void write_members_back() {
    if (!std::exchange(member_written_, false)) return;
    for (auto& unit : units_) unit.module.reshard();
  }

  void zero_grad(bool set_to_none) {
    for (auto& model : plain_) model.module().zero_grad(set_to_none);
    sharded_optimizer_->zero_grad(set_to_none);
    compare_gradients();
  }

  size_t own() const { return static_cast<size_t>(rank_); }

  const Program& program_;
  int64_t rank_;
  DeviceMesh mesh_;
  RandomModel sharded_;
  std::vector<RandomModel> plain_;  // per rank
  std::map<int, Compared> tensors_;
  std::vector<Chunk> chunks_;
  std::vector<ShardedUnit> units_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> plain_optimizers_;
  std::unique_ptr<torch::optim::Optimizer> sharded_optimizer_;
  bool member_written_ = false;
  size_t step_ = 0;
  std::optional<std::string> difference_;
};

}  // namespace

std::optional<std::string> run_program(const Program& program, int64_t rank, const DeviceMesh& mesh) {
  return SideBySide(program, rank, mesh).run();
}

}  // namespace fsdp::testing
