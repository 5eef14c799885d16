#include "tests/training_programs/transformers.h"

#include "checkpoint/checkpoint.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/grad_scaler.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/parallelize_module.h"
#include "tests/support/default_generator.h"

#include <torch/optim/adamw.h>
#include <torch/utils.h>

namespace fsdp::testing {
namespace {

constexpr int kTransformerSteps = 3;
constexpr int64_t kTokens = 12;
const programs::TransformerConfig kConfig = {
    .vocab = 32, .width = 32, .blocks = 2, .max_tokens = kTokens};

programs::Transformer make_transformer() {
  return drawn_from_seed(1, [] { return programs::Transformer(kConfig); });
}

void shard(programs::Transformer& model, const DeviceMesh& mesh,
           const FullyShardOptions& options = {}) {
  for (auto& block : model->blocks) fully_shard(block, mesh, options);
  fully_shard(model, mesh, options);
}

torch::optim::AdamW make_adamw(const programs::Transformer& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-3).eps(1e-3));
}

enum class ForwardPass { kPlain, kRecomputed };

at::Tensor loss_of_batch(programs::Transformer& model, const ProgramRank& rank, int64_t data_rank,
                         ForwardPass pass = ForwardPass::kPlain) {
  const auto text =
      ((torch::arange(2 * (kTokens + 1)) * 7 + data_rank * 5) % kConfig.vocab).view({2, -1});
  const auto on_device = text.to(rank.device());
  const auto forward = [&](const at::Tensor& tokens) { return model->forward(tokens); };
  const auto tokens = on_device.narrow(1, 0, kTokens).contiguous();
  const auto logits =
      pass == ForwardPass::kRecomputed ? checkpoint(forward, tokens) : forward(tokens);
  return programs::next_token_loss(logits, on_device.narrow(1, 1, kTokens).contiguous());
}

void train(ProgramRank& rank, programs::Transformer& model, torch::optim::AdamW& optimizer,
           int64_t data_rank, ForwardPass pass = ForwardPass::kPlain) {
  rank.steps(kTransformerSteps, [&] {
    optimizer.zero_grad();
    const auto loss = loss_of_batch(model, rank, data_rank, pass);
    loss.backward();
    rank.keep(loss);
    rank.keep(clip_grad_norm_(model->parameters(), 0.5));
    optimizer.step();
  });
}

}  // namespace

void train_transformer(ProgramRank& rank) {
  auto model = make_transformer();
  shard(model, rank.mesh());
  auto optimizer = make_adamw(model);
  train(rank, model, optimizer, rank.rank(), ForwardPass::kRecomputed);
  rank.keep_parameters(*model);
}

void train_transformer_in_half(ProgramRank& rank) {
  auto model = make_transformer();
  shard(model, rank.mesh(),
        {.mp_policy = {.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat}});
  auto optimizer = make_adamw(model);
  GradScaler scaler(rank.mesh(), {.init_scale = 1024});
  rank.steps(kTransformerSteps, [&] {
    optimizer.zero_grad();
    const auto loss = loss_of_batch(model, rank, rank.rank()).to(torch::kFloat);
    scaler.scale(loss).backward();
    rank.keep(loss);
    scaler.step(optimizer);
    scaler.update();
  });
  rank.keep_parameters(*model);
}

void train_tensor_parallel_transformer(ProgramRank& rank) {
  const auto mesh = init_device_mesh(rank.device().type(), {1, rank.mesh().size()}, {"dp", "tp"});
  auto model = make_transformer();
  model->to(rank.device());
  parallelize_module(model, mesh["tp"],
                     programs::transformer_plan(kConfig.width / kConfig.heads,
                                                /*sequence_parallel=*/true));
  shard(model, mesh["dp"]);
  auto optimizer = make_adamw(model);
  train(rank, model, optimizer, /*data_rank=*/0);
  rank.keep_parameters(*model);
}

TrainingProgram training_that_is_resumed(const std::string& folder) {
  return [folder](ProgramRank& rank) {
    auto first = make_transformer();
    shard(first, rank.mesh());
    auto optimizer = make_adamw(first);
    train(rank, first, optimizer, rank.rank());
    const auto path = folder + "/" + c10::DeviceTypeName(rank.device().type());
    save({.model = first, .optimizer = optimizer}, path);
    programs::Transformer second(kConfig);
    shard(second, rank.mesh());
    auto other = make_adamw(second);
    load({.model = second, .optimizer = other}, path);
    train(rank, second, other, rank.rank());
    rank.keep_parameters(*second);
  };
}

}  // namespace fsdp::testing
