#include "tests/fully_shard/random_programs/program_run.h"

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/random_programs/program_losses.h"
#include "tests/fully_shard/random_programs/program_traits.h"
#include "tests/fully_shard/random_programs/repeated_step.h"
#include "tests/fully_shard/random_programs/residency_oracle.h"
#include "tests/fully_shard/random_programs/sharded_program.h"
#include "tests/fully_shard/random_programs/side_comparison.h"
#include "tests/fully_shard/random_programs/unsharded_program.h"
#include "tests/support/full_value.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using at::Tensor;

class SideBySide {
 public:
  SideBySide(const Program& program, int64_t rank, const DeviceMesh& mesh, const Prepare& prepare)
      : program_(program),
        rank_(rank),
        sharded_(program, mesh, prepare),
        plain_(program, sharded_.sharded_tensors()),
        comparison_(program, rank, sharded_, plain_) {
    if (program.tensor_ranks > 0) return;             // what DTensors do is not foreseen
    if (program.world == 1 || program.evict) return;  // nothing is gathered, or always
    oracle_.emplace(mesh, sharded_.observed_units());
    sharded_.set_oracle(&*oracle_);
  }

  std::optional<std::string> run() {
    if (sharded_.started_without_values() != program_.deferred)
      comparison_.differ("what was deferred started with values, or something else without");
    for (size_t i = 0; i < program_.actions.size(); ++i) {
      comparison_.set_place("action " + std::to_string(i));
      perform(program_.actions[i]);
      ask_oracle();
    }
    comparison_.set_place("");
    write_members_back();
    comparison_.compare_parameters("at the end");
    if (oracle_) repeat_a_step();
    return comparison_.difference();
  }

 private:
  // Collective.
  void follow_gradients() {
    at::NoGradGuard no_grad;
    for (const auto& [id, unit] : sharded_.sharded_tensors()) {
      const auto gradient = sharded_.entry(id).grad();
      const bool may_differ = plain_.bound(id).defined() || program_.tensor_ranks > 0;
      if (may_differ && gradient.defined()) plain_.follow_gradient(id, full_value(gradient));
    }
  }

  void ask_oracle() {
    if (!oracle_) return;
    oracle_->check_counts();
    if (oracle_->difference()) comparison_.differ(*oracle_->difference());
  }

  void repeat_a_step() {
    if (!program_.root.is_unit || has_prefetch_lists(program_)) return;
    const auto action = std::find_if(program_.actions.begin(), program_.actions.end(),
                                     [](auto& a) { return a.kind == ActionKind::kTrain; });
    if (action == program_.actions.end()) return;
    const auto step = [&] {
      forward_losses(program_, sharded_.model(), *action, rank_).losses[0].backward();
    };
    if (const auto wrong = repeat_step(step, *oracle_, sharded_.prefetch_rule()))
      comparison_.differ(*wrong);
    ask_oracle();
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
        return sharded_.set_sync(action.target, action.flag);
      case ActionKind::kSetAllReduce:
        return sharded_.set_all_reduce(action.target, action.flag);
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
        return sharded_.by_hand(action);
    }
  }

  void train(const Action& action) {
    std::vector<Losses> plain;
    for (int64_t r = 0; r < program_.world; ++r) {
      plain.push_back(forward_losses(program_, plain_.model(r), action, r));
    }
    auto sharded = forward_losses(program_, sharded_.model(), action, rank_);
    const auto& mine = plain[static_cast<size_t>(rank_)];
    comparison_.compare("output of the evaluation before backward", sharded.evaluated,
                        mine.evaluated);
    for (size_t i = 0; i < sharded.losses.size(); ++i) {
      comparison_.compare("loss", sharded.losses[i].detach(), mine.losses[i].detach());
      const bool retain = sharded.retain_graph && i + 1 < sharded.losses.size();
      sharded.losses[i].backward({}, retain);
      plain_.backward(plain, i, retain, [this](int id, const std::set<int>& arrived) {
        return sharded_.reduction_of(id, arrived);
      });
      comparison_.compare_gradients();
      follow_gradients();
    }
    for (size_t i = 0; i < sharded.inputs.size(); ++i) {
      comparison_.compare("gradient of the input", sharded.inputs[i].grad(), mine.inputs[i].grad());
    }
  }

  void evaluate(const Action& action) {
    const Forward forward{.rank = rank_, .condition = action.condition};
    const auto input = make_input(program_, plain_.model(rank_), action.data, rank_);
    const auto both = [&] {
      const auto expected = plain_.model(rank_).forward(input, forward);
      const auto output = sharded_.model().forward(input, forward);
      comparison_.compare("output of evaluation", output, expected);
      if (!program_.weighs_entries) return;
      comparison_.compare("metric of evaluation", metric_of(sharded_.model(), output),
                          metric_of(plain_.model(rank_), expected));
    };
    if (action.kind == ActionKind::kInference) {
      c10::InferenceMode inference;
      both();
    } else {
      at::NoGradGuard no_grad;
      both();
    }
  }

  void throw_inside(const Action& action) {
    bool expected = false;
    for (int64_t r = 0; r < program_.world; ++r) {
      expected = throws_as_planned(program_, plain_.model(r), action, r);
    }
    if (throws_as_planned(program_, sharded_.model(), action, rank_) != expected) {
      comparison_.differ("the planned exception came on one side only");
    }
    if (action.kind == ActionKind::kThrowInForward) return;
    sharded_.zero_pending_gradients();
    sharded_.model().module().zero_grad();
    plain_.drop_gradients();
    comparison_.compare_gradients();
  }

  void freeze(int param_id, bool frozen) {
    const auto* param = find_param(program_, param_id);
    if (param == nullptr) return;
    const auto& tensor = tensor_of(program_, *param);
    if (tensor.anchor) return;
    plain_.set_requires_grad(tensor.id, !frozen);
    sharded_.set_requires_grad(tensor.id, !frozen);
  }

  void write(const Action& action) {
    const auto* param = find_param(program_, action.target);
    if (param == nullptr) return;
    at::NoGradGuard no_grad;
    const int id = tensor_of(program_, *param).id;
    plain_.multiply(id, action.value, action.kind == ActionKind::kWriteEntry);
    if (action.kind == ActionKind::kWriteMember) {
      sharded_.member(id).mul_(action.value);
      member_written_ = true;
    } else {
      sharded_.entry(id).mul_(action.value);
    }
  }

  // Gradients of local parameters differ from rank to rank and have no common norm: they
  // are left out.
  void clip(const Action& action) {
    const double p = action.flag ? std::numeric_limits<double>::infinity() : 2.0;
    std::vector<Tensor> entries;
    for (const auto& [id, unit] : sharded_.sharded_tensors()) entries.push_back(sharded_.entry(id));
    const auto expected = plain_.clip(action.value, p);
    const double norm = full_value(clip_grad_norm_(entries, action.value, p)).item().toDouble();
    if (std::abs(norm - expected.norm) > expected.precision * expected.norm) {
      comparison_.differ("clip_grad_norm_ gave " + std::to_string(norm) + " but unsharded " +
                         std::to_string(expected.norm));
    }
    comparison_.compare_gradients();
    follow_gradients();
  }

  // A write to a member reaches the shard, which weight decay reads, at the next forward
  // or reshard.
  void optimizer_step() {
    write_members_back();
    plain_.step();
    sharded_.optimizer().step();
    comparison_.compare_parameters("after the optimizer");
  }

  // Only then: resharding in between would hide a copy that stayed behind its shard.
  void write_members_back() {
    if (std::exchange(member_written_, false)) sharded_.reshard_all();
  }

  void zero_grad(bool set_to_none) {
    plain_.zero_grad(set_to_none);
    sharded_.optimizer().zero_grad(set_to_none);
    comparison_.compare_gradients();
  }

  const Program& program_;
  int64_t rank_;
  ShardedProgram sharded_;
  UnshardedProgram plain_;
  SideComparison comparison_;
  std::optional<ResidencyOracle> oracle_;
  bool member_written_ = false;
};

}  // namespace

std::optional<std::string> run_program(const Program& program, int64_t rank, const DeviceMesh& mesh,
                                       const Prepare& prepare) {
  return SideBySide(program, rank, mesh, prepare).run();
}

}  // namespace fsdp::testing
