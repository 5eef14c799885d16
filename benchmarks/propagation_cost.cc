// What operators cost on DTensors beyond what they cost on this rank's part: time per
// call in nanoseconds, median of interleaved rounds. And what a tensor-parallel mesh of
// one rank costs a model: time of forward and backward over that of the plain module.
//
//   propagation_cost [--rounds=41] [--calls=2000] [--only=mm] [--width=256] [--steps=30]
//
// Operands lie so that nothing moves, on a mesh of two ranks, of which this process is
// one; every call but the first finds what was chosen before. "below autograd" is the
// DTensor's own cost; "recorded" has what is computed from a tensor-parallel parameter,
// under autograd, beside the part under autograd.
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/parallelize_module.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

ABSL_FLAG(int, rounds, 41, "rounds, over which medians are taken");
ABSL_FLAG(int, calls, 2000, "calls per round");
ABSL_FLAG(std::string, only, "", "the one operator to measure, and no model");
ABSL_FLAG(int64_t, width, 256, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks of the model");
ABSL_FLAG(int64_t, tokens, 128, "tokens per sequence, of two sequences");
ABSL_FLAG(int, steps, 30, "forwards and backwards of the model");

namespace {

using at::Tensor;
using fsdp::DeviceMesh;
using fsdp::Placement;
using fsdp::Replicate;
using fsdp::Shard;

struct Operand {
  std::vector<int64_t> shape;
  Placement placement;
};

struct Case {
  std::string name;
  std::vector<Operand> operands;
  std::function<void(const std::vector<Tensor>&)> body;
};

using Tensors = std::vector<Tensor>;

std::vector<Case> cases() {
  const Placement whole = Replicate{}, rows = Shard{0}, columns = Shard{1}, heads = Shard{1};
  const Tensor tokens = at::randint(0, 16, {8}, at::kLong);
  return {
      {"mm", {{{8, 16}, whole}, {{16, 16}, columns}}, [](const Tensors& t) { at::mm(t[0], t[1]); }},
      {"addmm",
       {{{16}, rows}, {{8, 16}, whole}, {{16, 16}, columns}},
       [](const Tensors& t) { at::addmm(t[0], t[1], t[2]); }},
      {"bmm",
       {{{4, 8, 16}, rows}, {{4, 16, 8}, rows}},
       [](const Tensors& t) { at::bmm(t[0], t[1]); }},
      {"add", {{{8, 16}, columns}, {{8, 16}, columns}}, [](const Tensors& t) { t[0].add(t[1]); }},
      {"mul, broadcast",
       {{{8, 16}, rows}, {{16}, whole}},
       [](const Tensors& t) { t[0].mul(t[1]); }},
      {"silu", {{{8, 16}, columns}}, [](const Tensors& t) { at::silu(t[0]); }},
      {"pow", {{{8, 16}, columns}}, [](const Tensors& t) { t[0].pow(2); }},
      {"t", {{{16, 16}, rows}}, [](const Tensors& t) { t[0].t(); }},
      {"transpose", {{{2, 8, 4, 4}, Shard{2}}}, [](const Tensors& t) { t[0].transpose(1, 2); }},
      {"view",
       {{{2, 8, 16}, Shard{2}}},
       [](const Tensors& t) {
         t[0].view({2, 8, -1, 4});
       }},
      {"slice", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].slice(1, 2, 6); }},
      {"select", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].select(1, 2); }},
      {"split", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].split(8, 1); }},
      {"expand",
       {{{8, 1}, rows}},
       [](const Tensors& t) {
         t[0].expand({-1, 4});
       }},
      {"unsqueeze", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].unsqueeze(0); }},
      {"detach", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].detach(); }},
      {"clone", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].clone(); }},
      {"cat",
       {{{8, 16}, rows}, {{8, 16}, rows}},
       [](const Tensors& t) {
         at::cat({t[0], t[1]}, 1);
       }},
      {"sum", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].sum(1); }},
      {"mean", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].mean(1, true); }},
      {"softmax", {{{8, 16}, rows}}, [](const Tensors& t) { t[0].softmax(1); }},
      {"layer_norm",
       {{{8, 16}, rows}, {{16}, whole}},
       [](const Tensors& t) { at::layer_norm(t[0], {16}, t[1]); }},
      {"embedding",
       {{{16, 16}, columns}},
       [tokens](const Tensors& t) { at::embedding(t[0], tokens); }},
      {"attention",
       {{{2, 4, 8, 4}, heads}, {{2, 4, 8, 4}, heads}, {{2, 4, 8, 4}, heads}},
       [](const Tensors& t) { at::scaled_dot_product_attention(t[0], t[1], t[2]); }},
      {"zeros_like", {{{8, 16}, rows}}, [](const Tensors& t) { at::zeros_like(t[0]); }},
      {"copy_", {{{8, 16}, rows}, {{8, 16}, rows}}, [](const Tensors& t) { t[0].copy_(t[1]); }},
  };
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double nanoseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

// Of the call on `operands`, and what it takes beyond the call on their parts.
struct Cost {
  double part, added;
};

Cost cost_of(const Case& each, const Tensors& operands) {
  Tensors parts;
  for (const Tensor& operand : operands) {
    parts.push_back(fsdp::DTensor(operand).to_local().detach());
    parts.back().set_requires_grad(operand.requires_grad());
  }
  std::vector<double> part, added;
  const int calls = absl::GetFlag(FLAGS_calls);
  const auto per_call = [&](const Tensors& given) {
    return nanoseconds([&] {
             for (int i = 0; i < calls; ++i) each.body(given);
           }) /
           calls;
  };
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    part.push_back(per_call(parts));
    added.push_back(per_call(operands) - part.back());
  }
  return {median(part), median(added)};
}

// As parameters of a module, so that what is computed from them is recorded.
Tensors parallel_operands(const Case& each, const DeviceMesh& mesh,
                          std::vector<std::shared_ptr<torch::nn::Module>>& keep_alive) {
  auto module = std::make_shared<torch::nn::Module>();
  fsdp::ParallelPlan plan;
  Tensors operands;
  for (const Operand& operand : each.operands) {
    const std::string name = "operand" + std::to_string(operands.size());
    operands.push_back(module->register_parameter(name, at::randn(operand.shape)));
    plan.emplace_back(name, fsdp::ShardParameter{operand.placement});
  }
  fsdp::parallelize_module(*module, mesh, plan);
  keep_alive.push_back(std::move(module));
  return operands;
}

void measure_operators(const DeviceMesh& mesh) {
  std::printf("%-16s %12s %12s %12s %12s\n", "operator, ns", "part", "+ below", "part",
              "+ recorded");
  std::vector<std::shared_ptr<torch::nn::Module>> keep_alive;
  const std::string only = absl::GetFlag(FLAGS_only);
  for (const Case& each : cases()) {
    if (!only.empty() && each.name != only) continue;
    Tensors plain;
    for (const Operand& operand : each.operands) {
      plain.push_back(fsdp::distribute_tensor(at::randn(operand.shape), mesh, {operand.placement}));
    }
    const Cost below = cost_of(each, plain);
    const bool writes = each.name == "copy_";  // a leaf cannot be written under autograd
    const Cost recorded =
        writes ? Cost{0, 0} : cost_of(each, parallel_operands(each, mesh, keep_alive));
    std::printf("%-16s %12.0f %12.0f %12.0f %12.0f\n", each.name.c_str(), below.part, below.added,
                recorded.part, recorded.added);
  }
}

double step_nanoseconds(programs::Transformer& model, const Tensor& text) {
  const int64_t tokens = absl::GetFlag(FLAGS_tokens);
  model->zero_grad();
  return nanoseconds([&] {
    programs::next_token_loss(model->forward(text.narrow(1, 0, tokens)), text.narrow(1, 1, tokens))
        .backward();
  });
}

void measure_model(const DeviceMesh& one_rank, bool cut_sequence) {
  const programs::TransformerConfig config{.width = absl::GetFlag(FLAGS_width),
                                           .blocks = absl::GetFlag(FLAGS_blocks),
                                           .max_tokens = absl::GetFlag(FLAGS_tokens)};
  programs::Transformer plain(config), parallel(config);
  fsdp::parallelize_module(parallel, one_rank,
                           programs::transformer_plan(config.width / config.heads, cut_sequence));
  const Tensor text = at::randint(0, 64, {2, config.max_tokens + 1}, at::kLong);
  std::vector<double> ratios, of_plain;
  for (int step = -3; step < absl::GetFlag(FLAGS_steps); ++step) {
    const double base = step_nanoseconds(plain, text);
    const double ratio = step_nanoseconds(parallel, text) / base;
    if (step < 0) continue;
    of_plain.push_back(base);
    ratios.push_back(ratio);
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf(
      "width %lld, %lld blocks, %lld tokens%s: plain %.2f ms, tp 1 %.3f of it (%.3f..%.3f)\n",
      static_cast<long long>(config.width), static_cast<long long>(config.blocks),
      static_cast<long long>(config.max_tokens), cut_sequence ? ", sequence cut" : "",
      median(of_plain) / 1e6, median(ratios), ratios[ratios.size() / 4],
      ratios[ratios.size() * 3 / 4]);
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  at::set_num_threads(1);
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const auto mesh = fsdp::init_device_mesh(c10::kCPU, {1, 2}, {"one", "two"});
  measure_operators(mesh["two"]);
  for (const bool cut_sequence : {false, true})
    if (absl::GetFlag(FLAGS_only).empty()) measure_model(mesh["one"], cut_sequence);
  fsdp::destroy_process_group();
  return 0;
}
