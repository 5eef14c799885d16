#include "tests/fully_shard/random_programs/sharded_run.h"

#include "dtensor/dtensor.h"
#include "fully_shard/clip_grad_norm.h"
#include "tests/fully_shard/random_programs/program_losses.h"
#include "tests/fully_shard/random_programs/sharded_program.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <limits>
#include <utility>

namespace fsdp::testing {
namespace {

using at::Tensor;

class ShardedRun {
 public:
  ShardedRun(const Program& program, const DeviceMesh& mesh,
             const std::function<void(const RandomModel&)>& move_the_rest)
      : program_(program), rank_(mesh.rank()), sharded_(program, mesh, /*prepare=*/{}) {
    if (move_the_rest) move_the_rest(sharded_.model());
  }

  std::vector<KeptValue> run() {
    for (size_t i = 0; i < program_.actions.size(); ++i) {
      place_ = "action " + std::to_string(i) + ": ";
      perform(program_.actions[i]);
      keep_gradients();
    }
    place_ = "at the end: ";
    write_members_back();
    keep_parameters();
    for (auto& kept : kept_) kept.value = kept.value.defined() ? kept.value.cpu() : kept.value;
    return std::move(kept_);
  }

 private:
  // A copy, as it is on the current stream now.
  void keep(const std::string& what, const Tensor& value) {
    const at::NoGradGuard no_grad;
    if (!value.defined()) return kept_.push_back({place_ + what, value});
    const auto own = is_dtensor(value) ? DTensor(value).to_local() : value;
    kept_.push_back({place_ + what, own.detach().clone()});
  }

  void keep_gradients() {
    for (const auto& [id, tensor] : sharded_.model().tensors)
      keep("gradient of p" + std::to_string(id), tensor.entry().grad());
  }

  void keep_parameters() {
    for (const auto& [id, tensor] : sharded_.model().tensors)
      keep("value of p" + std::to_string(id), tensor.entry());
  }

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
        return sharded_.set_sync(action.target, action.flag);
      case ActionKind::kSetAllReduce:
        return sharded_.set_all_reduce(action.target, action.flag);
      case ActionKind::kFreeze:
      case ActionKind::kUnfreeze:
      case ActionKind::kWriteMember:
      case ActionKind::kWriteEntry:
        return change(action);
      case ActionKind::kClip:
        return clip(action);
      case ActionKind::kStep:
        return optimizer_step();
      case ActionKind::kZeroGrad:
      case ActionKind::kZeroGradInPlace:
        return sharded_.optimizer().zero_grad(action.kind == ActionKind::kZeroGrad);
      default:
        return sharded_.by_hand(action);
    }
  }

  void train(const Action& action) {
    const auto losses = forward_losses(program_, sharded_.model(), action, rank_);
    keep("output of the evaluation before backward", losses.evaluated);
    for (size_t i = 0; i < losses.losses.size(); ++i) {
      keep("loss", losses.losses[i]);
      losses.losses[i].backward({}, losses.retain_graph && i + 1 < losses.losses.size());
      keep_gradients();
    }
    for (const auto& input : losses.inputs) keep("gradient of the input", input.grad());
  }

  void evaluate(const Action& action) {
    const Forward forward{.rank = rank_, .condition = action.condition};
    const auto input = make_input(program_, sharded_.model(), action.data, rank_);
    const c10::InferenceMode inference(action.kind == ActionKind::kInference);
    const at::NoGradGuard no_grad;
    const auto output = sharded_.model().forward(input, forward);
    keep("output of evaluation", output);
    if (program_.weighs_entries) keep("metric of evaluation", metric_of(sharded_.model(), output));
  }

  void throw_inside(const Action& action) {
    const bool threw = throws_as_planned(program_, sharded_.model(), action, rank_);
    keep("the planned exception", at::scalar_tensor(threw, at::kBool));
    if (action.kind == ActionKind::kThrowInForward) return;
    sharded_.zero_pending_gradients();
    sharded_.model().module().zero_grad();
  }

  void change(const Action& action) {
    const auto* param = find_param(program_, action.target);
    if (param == nullptr) return;
    const auto& tensor = tensor_of(program_, *param);
    const at::NoGradGuard no_grad;
    if (action.kind == ActionKind::kWriteEntry) {
      sharded_.entry(tensor.id).mul_(action.value);
    } else if (action.kind == ActionKind::kWriteMember) {
      sharded_.member(tensor.id).mul_(action.value);
      member_written_ = true;
    } else if (!tensor.anchor) {
      sharded_.set_requires_grad(tensor.id, action.kind == ActionKind::kUnfreeze);
    }
  }

  // Gradients of local parameters differ from rank to rank and have no common norm.
  void clip(const Action& action) {
    const double p = action.flag ? std::numeric_limits<double>::infinity() : 2.0;
    std::vector<Tensor> entries;
    for (const auto& [id, unit] : sharded_.sharded_tensors()) entries.push_back(sharded_.entry(id));
    keep("norm", clip_grad_norm_(entries, action.value, p));
  }

  void optimizer_step() {
    write_members_back();
    sharded_.optimizer().step();
    keep_parameters();
  }

  // The optimizer reads the shards.
  void write_members_back() {
    if (std::exchange(member_written_, false)) sharded_.reshard_all();
  }

  const Program& program_;
  int64_t rank_;
  ShardedProgram sharded_;
  std::string place_;
  std::vector<KeptValue> kept_;
  bool member_written_ = false;
};

}  // namespace

std::vector<KeptValue> run_sharded(const Program& program, const DeviceMesh& mesh,
                                   const std::function<void(const RandomModel&)>& move_the_rest) {
  return ShardedRun(program, mesh, move_the_rest).run();
}

}  // namespace fsdp::testing
