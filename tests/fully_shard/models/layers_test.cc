// Models of many layer types, every child a unit of its own, in training and evaluation.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

class Layers : public Worlds {};

struct ImageModelImpl : nn::Module {
  Tensor forward(Tensor x) {
    x = norm(grouped(torch::relu(first(x))));
    x = prelu(instance(group(transposed(x))));
    return out(x.mean({2, 3}));
  }
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).stride(2)));
  nn::Conv2d grouped = register_module("grouped", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).groups(4)));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(8));
  nn::ConvTranspose2d transposed = register_module(
      "transposed", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 6, 3).groups(2)));
  nn::GroupNorm group = register_module("group", nn::GroupNorm(nn::GroupNormOptions(3, 6)));
  nn::InstanceNorm2d instance = register_module(
      "instance",
      nn::InstanceNorm2d(nn::InstanceNorm2dOptions(6).affine(true).track_running_stats(true)));
  nn::PReLU prelu = register_module("prelu", nn::PReLU(nn::PReLUOptions().num_parameters(6)));
  nn::Linear out = register_module("out", nn::Linear(6, 3));
};
TORCH_MODULE(ImageModel);

struct SequenceModelImpl : nn::Module {
  Tensor forward(const Data& data) {
    auto x = std::get<0>(lstm(table(data.index)));
    const auto lengths = torch::tensor({5, 4, 2, 1});
    const auto packed = nn::utils::rnn::pack_padded_sequence(x, lengths, /*batch_first=*/true);
    x = std::get<0>(nn::utils::rnn::pad_packed_sequence(
        std::get<0>(gru->forward_with_packed_input(packed)), /*batch_first=*/true));
    x = std::get<0>(attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1)));
    const auto state = lstm_cell(x[0]);
    const auto pooled = norm(gru_cell(std::get<0>(state)));
    return bilinear(pooled, bag(data.index)) + conv(x.permute({1, 2, 0})).sum({1, 2}).unsqueeze(1);
  }
  nn::Embedding table = register_module("table", nn::Embedding(10, 6));
  nn::LSTM lstm = register_module(
      "lstm", nn::LSTM(nn::LSTMOptions(6, 4).bidirectional(true).batch_first(true)));
  nn::GRU gru = register_module("gru", nn::GRU(nn::GRUOptions(8, 8).batch_first(true)));
  nn::MultiheadAttention attention =
      register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2)));
  nn::LSTMCell lstm_cell = register_module("lstm_cell", nn::LSTMCell(8, 8));
  nn::GRUCell gru_cell = register_module("gru_cell", nn::GRUCell(8, 8));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  nn::EmbeddingBag bag = register_module("bag", nn::EmbeddingBag(10, 4));
  nn::Bilinear bilinear = register_module("bilinear", nn::Bilinear(8, 4, 1));
  nn::Conv1d conv = register_module("conv", nn::Conv1d(8, 2, 1));
};
TORCH_MODULE(SequenceModel);

Model image_model() {
  ImageModel model;
  return {model.ptr(),
          [model](const Data& data) mutable { return model(data.image).pow(2).sum(); }};
}

TEST_P(Layers, OfAnImageModelTrainAsUnitsOfTheirOwn) {
  expect_parity(world(), image_model, shard_children, "image");
}

TEST_P(Layers, OfAnImageModelInEvaluationModeToo) {
  const auto build = [] {
    auto model = image_model();
    model.module->eval();
    return model;
  };
  expect_parity(world(), build, shard_children, "image, evaluation mode");
}

TEST_P(Layers, OfASequenceModelTrainAsUnitsOfTheirOwn) {
  const auto build = []() -> Model {
    SequenceModel model;
    return {model.ptr(), [model](const Data& data) mutable { return model(data).pow(2).sum(); }};
  };
  expect_parity(world(), build, shard_children, "sequence");
}

// Buffers are each rank's own.
TEST_P(Layers, RunningStatisticsAreThoseOfThisRanksData) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto plain = build_seeded(image_model), sharded = build_seeded(image_model);
    shard_children(*sharded.module, mesh);
    for (uint64_t step = 0; step < 2; ++step) {
      const auto data = make_data(10 * step + static_cast<uint64_t>(rank));
      torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(sharded.loss(data), plain.loss(data)));
    }
    const auto buffers = sharded.module->named_buffers(), expected = plain.module->named_buffers();
    ASSERT_EQ(buffers.size(), expected.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      EXPECT_FALSE(is_dtensor(buffers[i].value())) << buffers[i].key();
      EXPECT_TRUE(torch::equal(buffers[i].value(), expected[i].value())) << buffers[i].key();
    }
  });
}

INSTANTIATE_WORLDS(Layers, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
