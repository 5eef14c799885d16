#include "tests/training_programs/stream_programs.h"

#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/default_generator.h"
#include "tests/support/on_another_thread.h"

#include <c10/core/DeviceGuard.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <memory>

namespace fsdp::testing {
namespace {

constexpr int kProgramSteps = 4;

// With eps as large as gradients are, what two devices round differently stays small.
torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(1e-2).eps(1e-3); }

struct Branches : torch::nn::Module {
  Branches() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    register_module("last", last);
  }
  at::Tensor before_branches(const at::Tensor& x) { return torch::gelu(norm(first(x))); }
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(second(before_branches(x)))); }

  // Rows of the last one's gradients fit in the memory that was the others' .grad.
  torch::nn::Linear first{16, 32}, second{32, 16}, last{16, 23};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({32})};
};

struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    register_module("a", a);
    register_module("b", b);
  }
  torch::nn::Linear a{16, 16}, b{16, 16};
};

template <class Model>
std::shared_ptr<Model> make() {
  return drawn_from_seed(1, [] { return std::make_shared<Model>(); });
}

std::shared_ptr<Branches> make_branches(const DeviceMesh& mesh,
                                        const FullyShardOptions& options = {}) {
  auto model = make<Branches>();
  for (auto* layer : {&model->first, &model->second, &model->last})
    fully_shard(**layer, mesh, options);
  fully_shard(*model, mesh, options);
  return model;
}

at::Tensor input_of(const ProgramRank& rank) {
  const auto values = torch::linspace(-1, 1 + static_cast<double>(rank.rank()), 96);
  return values.view({6, 16}).to(rank.device());
}

enum class Order { kSideFirst, kSideSecond };
enum class Mode { kTraining, kEvaluation };

// Steps of SGD on `loss`, or its values alone.
void run_steps(ProgramRank& rank, torch::nn::Module& model, Mode mode,
               const std::function<at::Tensor()>& loss) {
  torch::optim::SGD optimizer(model.parameters(), 1e-2);
  rank.steps(kProgramSteps, [&] {
    const c10::AutoGradMode mode_guard(mode == Mode::kTraining);
    optimizer.zero_grad();
    const auto value = loss();
    rank.keep(value);
    if (mode == Mode::kEvaluation) return;
    value.backward();
    optimizer.step();
  });
  rank.keep_parameters(model);
}

void use_on_both(ProgramRank& rank, Order order, Mode mode) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  run_steps(rank, *model, mode, [&] {
    const auto h = rank.hold(model->before_branches(x));
    at::Tensor one, two;
    const auto on_side = [&] { two = rank.hold(model->second(h)); };
    if (order == Order::kSideFirst) rank.on_side(on_side);
    one = model->second(h);
    if (order == Order::kSideSecond) rank.on_side(on_side);
    const auto y = model->last(torch::relu(one));
    rank.allocate_much();
    rank.join_side();
    return y.pow(2).sum() + two.pow(2).sum();
  });
}

void use_on_the_side_alone(ProgramRank& rank, Mode mode) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  run_steps(rank, *model, mode, [&] {
    const auto h = rank.hold(model->before_branches(x));
    at::Tensor two;
    rank.on_side([&] { two = rank.hold(model->second(h)); });
    const auto y = model->last(h.narrow(1, 0, 16));
    rank.allocate_much();
    rank.join_side();
    return y.pow(2).sum() + two.pow(2).sum();
  });
}

}  // namespace

void train_on_one_stream(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  run_steps(rank, *model, Mode::kTraining, [&] { return model->forward(x).pow(2).sum(); });
}

void train_with_a_second_branch(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  run_steps(rank, *model, Mode::kTraining, [&] {
    const auto h = rank.hold(model->before_branches(x));
    const auto one = model->second(h);
    at::Tensor two;
    rank.on_side([&] { two = rank.hold(model->second(h)); });
    rank.join_side();
    return model->last(torch::relu(one - 0.5 * two)).pow(2).sum();
  });
}

void train_with_the_second_use_on_the_side(ProgramRank& rank) {
  use_on_both(rank, Order::kSideSecond, Mode::kTraining);
}
void train_with_the_first_use_on_the_side(ProgramRank& rank) {
  use_on_both(rank, Order::kSideFirst, Mode::kTraining);
}
void evaluate_with_the_second_use_on_the_side(ProgramRank& rank) {
  use_on_both(rank, Order::kSideSecond, Mode::kEvaluation);
}
void evaluate_with_the_first_use_on_the_side(ProgramRank& rank) {
  use_on_both(rank, Order::kSideFirst, Mode::kEvaluation);
}
void train_a_unit_on_the_side(ProgramRank& rank) { use_on_the_side_alone(rank, Mode::kTraining); }
void evaluate_a_unit_on_the_side(ProgramRank& rank) {
  use_on_the_side_alone(rank, Mode::kEvaluation);
}

void train_one_unit_on_two_streams(ProgramRank& rank) {
  const auto model = make<TwoLayers>();
  fully_shard(*model, rank.mesh());
  const auto x = input_of(rank);
  run_steps(rank, *model, Mode::kTraining, [&] {
    const auto z = torch::tanh(model->b(x));
    at::Tensor y;
    rank.on_side([&] { y = rank.hold(torch::tanh(model->a(x))); });
    rank.join_side();
    return (y * z).sum();
  });
}

void gather_here_and_use_on_the_side(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  const c10::NoGradGuard no_grad;
  auto second = get_fsdp_module(*model->second);
  rank.steps(kProgramSteps, [&] {
    const auto h = rank.hold(model->before_branches(x));
    auto gather = second.unshard_async();
    at::Tensor two;
    rank.on_side([&] { two = rank.hold(model->second(h)); });
    rank.allocate_much();
    rank.join_side();
    second.reshard();
    rank.keep(two);
  });
}

void reshard_by_hand_while_the_side_reads(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  const c10::NoGradGuard no_grad;
  auto second = get_fsdp_module(*model->second);
  rank.steps(kProgramSteps, [&] {
    const auto h = rank.hold(model->before_branches(x));
    const auto one = model->second(h);
    at::Tensor two;
    rank.on_side([&] { two = rank.hold(model->second(h)); });
    second.reshard();
    rank.allocate_much();
    rank.keep(one);
    rank.join_side();
    rank.keep(two);
  });
}

void write_on_the_side(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  const c10::NoGradGuard no_grad;
  rank.steps(kProgramSteps, [&] {
    const auto h = rank.hold(model->before_branches(x));
    rank.keep(model->second(h));
    rank.on_side([&] { model->second->weight.mul_(0.5); });
    rank.keep(model->last(h.narrow(1, 0, 16)));
    at::Tensor two;
    rank.on_side_at_once([&] { two = rank.hold(model->second(h)); });
    rank.allocate_much();
    rank.join_side();
    rank.keep(two);
  });
  rank.keep_parameters(*model);
}

void write_pieces_on_the_side(ProgramRank& rank) {
  const auto mesh = init_device_mesh(rank.device().type(), {rank.mesh().size(), 1});
  const auto model = make_branches(mesh, {.outer = Outer::kShardOptimizer});
  const auto x = input_of(rank);
  const c10::NoGradGuard no_grad;
  rank.steps(kProgramSteps, [&] {
    const auto h = rank.hold(torch::relu(model->first(x)));
    rank.on_side([&] {
      for (auto* layer : {&model->second, &model->last}) {
        for (auto& piece : (*layer)->parameters()) piece.mul_(0.5);
      }
    });
    rank.allocate_much();
    rank.join_side();
    rank.keep(model->last(torch::relu(model->second(h))));
  });
  rank.keep_parameters(*model);
}

void accumulate_on_the_side(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  const auto x = input_of(rank);
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  rank.steps(kProgramSteps, [&] {
    optimizer.zero_grad();
    const auto h = rank.hold(model->before_branches(x).detach());
    {
      const NoSyncGuard no_sync(get_fsdp_module(*model));
      at::Tensor two;
      rank.on_side([&] { two = rank.hold(model->second(h)); });
      rank.join_side();
      two.pow(2).sum().backward();
    }
    model->last(h.narrow(1, 0, 16)).pow(2).sum().backward();
    rank.on_side_at_once([&] { rank.allocate_much(); });
    optimizer.step();
  });
  rank.keep_parameters(*model);
}

void evaluate_on_the_side(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  torch::optim::AdamW optimizer(model->parameters(), adamw());
  const auto x = input_of(rank);
  rank.steps(kProgramSteps, [&] {
    optimizer.zero_grad();
    model->forward(x).pow(2).sum().backward();
    optimizer.step();
    at::Tensor y;
    rank.on_side([&] {
      const c10::NoGradGuard no_grad;
      y = rank.hold(model->forward(x));
    });
    rank.allocate_much();
    rank.join_side();
    rank.keep(y);
  });
  rank.keep_parameters(*model);
}

void train_recomputed_on_the_side(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  const auto x = input_of(rank);
  rank.steps(kProgramSteps, [&] {
    rank.on_side([&] {
      optimizer.zero_grad();
      const auto forward = [&](const at::Tensor& in) { return model->forward(in); };
      const auto loss = checkpoint({.preserve_rng_state = false}, forward, x).pow(2).sum();
      loss.backward();
      optimizer.step();
      rank.keep(rank.hold(loss));
    });
    rank.join_side();
  });
  rank.keep_parameters(*model);
}

void train_with_backward_on_a_thread(ProgramRank& rank) {
  const auto model = make_branches(rank.mesh());
  torch::optim::AdamW optimizer(model->parameters(), adamw());
  const auto x = input_of(rank);
  rank.steps(kProgramSteps, [&] {
    optimizer.zero_grad();
    const auto loss = model->forward(x).pow(2).sum();
    rank.keep(loss);
    on_another_thread([&] {
      const c10::OptionalDeviceGuard guard(x.device());
      loss.backward();
    });
    optimizer.step();
  });
  rank.keep_parameters(*model);
}

std::vector<NamedProgram> stream_programs() {
  return {{"OneStream", train_on_one_stream},
          {"SecondBranch", train_with_a_second_branch, Gradients::kChangeStreams},
          {"SecondUseOnTheSide", train_with_the_second_use_on_the_side, Gradients::kChangeStreams},
          {"FirstUseOnTheSide", train_with_the_first_use_on_the_side, Gradients::kChangeStreams},
          {"EvaluationWithTheSecondUseOnTheSide", evaluate_with_the_second_use_on_the_side},
          {"EvaluationWithTheFirstUseOnTheSide", evaluate_with_the_first_use_on_the_side},
          {"OneUnitOnTwoStreams", train_one_unit_on_two_streams, Gradients::kChangeStreams},
          {"UnitOnTheSide", train_a_unit_on_the_side, Gradients::kChangeStreams},
          {"EvaluationOfAUnitOnTheSide", evaluate_a_unit_on_the_side},
          {"GatheredHereAndUsedOnTheSide", gather_here_and_use_on_the_side},
          {"ReshardedWhileTheSideReads", reshard_by_hand_while_the_side_reads},
          {"WriteOnTheSide", write_on_the_side},
          {"AccumulationOnTheSide", accumulate_on_the_side, Gradients::kChangeStreams},
          {"EvaluationOnTheSide", evaluate_on_the_side},
          {"RecomputationOnTheSide", train_recomputed_on_the_side},
          {"BackwardOnAThread", train_with_backward_on_a_thread}};
}

}  // namespace fsdp::testing
