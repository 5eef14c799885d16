#include "tests/simulated_accelerator/small_models.h"

#include "tests/simulated_accelerator/move_module.h"
#include "tests/simulated_accelerator/run.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

namespace fsdp::testing::simulated {
namespace {

constexpr int64_t kVocabulary = 11;

// Steps of a model that has been moved; `loss_of` takes the number of the step.
Results train(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
              const std::function<at::Tensor(int)>& loss_of, const AfterStep& after_step) {
  Results losses, results;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(step);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
    if (after_step) after_step(step);
  }
  for (const auto& loss : losses) results.push_back(loss.cpu());
  for (const auto& parameter : model.parameters()) results.push_back(parameter.detach().cpu());
  return results;
}

// The batches of all steps, so that a step itself copies nothing from the host.
Results batches(c10::Device device, const std::function<at::Tensor(int)>& batch) {
  Results moved;
  for (int step = 0; step < kSteps; ++step) moved.push_back(batch(step).to(device));
  return moved;
}

}  // namespace

PlainMlp::PlainMlp() : first(12, 32), second(32, 32), last(32, 5) {
  register_module("first", first);
  register_module("second", second);
  register_module("last", last);
}

at::Tensor PlainMlp::forward(const at::Tensor& x) {
  return last(torch::tanh(second(torch::relu(first(x)))));
}

TokenModel::TokenModel()
    : embedding(kVocabulary, 16),
      first(16, 32),
      norm(torch::nn::LayerNormOptions({32})),
      dropout(0.1),
      twice(32, 16),
      last(16, kVocabulary) {
  register_module("embedding", embedding);
  register_module("first", first);
  register_module("norm", norm);
  register_module("dropout", dropout);
  register_module("twice", twice);
  register_module("last", last);
}

at::Tensor TokenModel::forward(const at::Tensor& tokens) {
  const auto x = dropout(torch::gelu(norm(first(embedding(tokens)))));
  const auto one = twice(x);
  return last(torch::relu(one - 0.5 * second_use(x)));
}

at::Tensor TokenModel::second_use(const at::Tensor& x) {
  if (!second_stream) return twice(x);
  const auto here = current_stream(x.device());
  c10::Event before(kDeviceType), after(kDeviceType);
  before.record(here);
  before.block(*second_stream);
  at::Tensor result;
  {
    const c10::StreamGuard there(*second_stream);
    result = twice(x);
    after.record(*second_stream);
  }
  x.record_stream(*second_stream);
  result.record_stream(here);
  after.block(here);
  return result;
}

Results train_plain_mlp(c10::Device device, const AfterStep& after_step) {
  torch::manual_seed(1);
  PlainMlp model;
  move_to(model, device);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto inputs = batches(device, [](int step) {
    return torch::linspace(-1, 1 + step, 6 * 12).view({6, 12});
  });
  const auto loss_of = [&](int step) {
    return model.forward(inputs[static_cast<size_t>(step)]).pow(2).sum();
  };
  return train(model, optimizer, loss_of, after_step);
}

Results train_token_model(c10::Device device, std::optional<c10::Stream> second_stream,
                          const AfterStep& after_step) {
  torch::manual_seed(1);
  TokenModel model;
  model.second_stream = second_stream;
  move_to(model, device);
  torch::optim::AdamW optimizer(model.parameters(),
                                torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  const auto tokens =
      batches(device, [](int step) { return torch::arange(6) * (step + 3) % kVocabulary; });
  const auto targets =
      batches(device, [](int step) { return torch::arange(6) * (step + 5) % kVocabulary; });
  torch::manual_seed(7);  // what dropout draws
  const auto loss_of = [&](int step) {
    const auto logits = model.forward(tokens[static_cast<size_t>(step)]);
    return torch::nn::functional::cross_entropy(logits, targets[static_cast<size_t>(step)]);
  };
  return train(model, optimizer, loss_of, after_step);
}

}  // namespace fsdp::testing::simulated
