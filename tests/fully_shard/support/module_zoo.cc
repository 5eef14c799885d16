#include "tests/fully_shard/support/module_zoo.h"

#include <utility>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

template <class Make, class Loss>
ZooCase zoo(std::string name, Make make, Loss loss) {
  return {
      std::move(name), [make, loss]() -> Model {
        auto module = make();
        if constexpr (requires { module.ptr(); }) {
          return {module.ptr(),
                  [module, loss](const Data& data) mutable { return loss(module, data); }};
        } else {
          return {module, [module, loss](const Data& data) mutable { return loss(module, data); }};
        }
      }};
}

torch::Tensor square_sum(const torch::Tensor& tensor) { return tensor.pow(2).sum(); }
torch::Tensor cube_sum(const torch::Tensor& tensor) { return tensor.pow(3).sum(); }

struct ListModel : nn::Module {
  nn::ParameterList list{nullptr};
  ListModel() {
    list = register_module("list", nn::ParameterList());
    list->append(torch::ones({16, 4}) * 0.1);
    list->append(torch::ones({4}));
    for (auto& parameter : list->parameters()) parameter.set_requires_grad(true);
  }
};

struct WeightNormModel : nn::Module {
  torch::Tensor w = register_parameter("w", torch::randn({5, 16}));
  torch::Tensor g = register_parameter("g", torch::ones({5, 1}));
};

}  // namespace

std::vector<ZooCase> zoo_cases() {
  return {
      zoo(
          "Linear", [] { return nn::Linear(16, 7); },
          [](auto& m, auto& d) { return square_sum(m(d.x)); }),
      zoo(
          "Bilinear", [] { return nn::Bilinear(16, 16, 5); },
          [](auto& m, auto& d) { return square_sum(m(d.x, d.x)); }),
      zoo(
          "Conv1d", [] { return nn::Conv1d(nn::Conv1dOptions(3, 5, 3).padding(1)); },
          [](auto& m, auto& d) { return square_sum(m(d.sequence)); }),
      zoo(
          "Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(3, 8, 3).stride(2)); },
          [](auto& m, auto& d) { return square_sum(m(d.image)); }),
      zoo(
          "Conv3d", [] { return nn::Conv3d(nn::Conv3dOptions(3, 4, 3)); },
          [](auto& m, auto& d) { return square_sum(m(d.volume)); }),
      zoo(
          "ConvTranspose1d",
          [] { return nn::ConvTranspose1d(nn::ConvTranspose1dOptions(3, 5, 3)); },
          [](auto& m, auto& d) { return square_sum(m(d.sequence)); }),
      zoo(
          "ConvTranspose2d",
          [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 5, 3)); },
          [](auto& m, auto& d) { return square_sum(m(d.image)); }),
      zoo(
          "BatchNorm1d", [] { return nn::BatchNorm1d(3); },
          [](auto& m, auto& d) { return cube_sum(m(d.sequence)); }),
      zoo(
          "BatchNorm2d", [] { return nn::BatchNorm2d(3); },
          [](auto& m, auto& d) { return cube_sum(m(d.image)); }),
      zoo(
          "InstanceNorm2d",
          [] { return nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true)); },
          [](auto& m, auto& d) { return cube_sum(m(d.image)); }),
      zoo(
          "LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({16})); },
          [](auto& m, auto& d) { return cube_sum(m(d.x)); }),
      zoo(
          "GroupNorm", [] { return nn::GroupNorm(nn::GroupNormOptions(3, 3)); },
          [](auto& m, auto& d) { return cube_sum(m(d.image)); }),
      zoo(
          "PReLU", [] { return nn::PReLU(); }, [](auto& m, auto& d) { return square_sum(m(d.x)); }),
      zoo(
          "Embedding", [] { return nn::Embedding(10, 6); },
          [](auto& m, auto& d) { return square_sum(m(d.index)); }),
      zoo(
          "EmbeddingBag", [] { return nn::EmbeddingBag(10, 6); },
          [](auto& m, auto& d) { return square_sum(m(d.index)); }),
      zoo(
          "RNN", [] { return nn::RNN(nn::RNNOptions(16, 12).num_layers(2)); },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x))); }),
      zoo(
          "LSTM",
          [] { return nn::LSTM(nn::LSTMOptions(16, 12).num_layers(2).bidirectional(true)); },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x))); }),
      zoo(
          "GRU", [] { return nn::GRU(nn::GRUOptions(16, 12).num_layers(2)); },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x))); }),
      zoo(
          "LSTMCell", [] { return nn::LSTMCell(16, 12); },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x[0]))); }),
      zoo(
          "GRUCell", [] { return nn::GRUCell(16, 12); },
          [](auto& m, auto& d) { return square_sum(m(d.x[0])); }),
      zoo(
          "MultiheadAttention", [] { return nn::MultiheadAttention(16, 4); },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x, d.x, d.x))); }),
      zoo(
          "MultiheadAttention with kdim and vdim",
          [] {
            return nn::MultiheadAttention(
                nn::MultiheadAttentionOptions(16, 4).kdim(16).vdim(16).add_bias_kv(true));
          },
          [](auto& m, auto& d) { return square_sum(std::get<0>(m(d.x, d.x, d.x))); }),
      zoo(
          "TransformerEncoderLayer",
          [] {
            return nn::TransformerEncoderLayer(
                nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0));
          },
          [](auto& m, auto& d) { return cube_sum(m(d.x)); }),
      zoo(
          "Transformer",
          [] {
            return nn::Transformer(nn::TransformerOptions(16, 4)
                                       .num_encoder_layers(2)
                                       .num_decoder_layers(2)
                                       .dim_feedforward(32)
                                       .dropout(0));
          },
          [](auto& m, auto& d) { return cube_sum(m(d.x, d.x)); }),
      zoo(
          "AdaptiveLogSoftmaxWithLoss",
          [] {
            return nn::AdaptiveLogSoftmaxWithLoss(
                nn::AdaptiveLogSoftmaxWithLossOptions(16, 20, {5, 10}));
          },
          [](auto& m, auto& d) {
            return square_sum(m(d.x.view({32, 16}), torch::arange(32) % 20).output);
          }),
      zoo(
          "ParameterList", [] { return std::make_shared<ListModel>(); },
          [](auto& m, auto& d) { return square_sum(d.x.matmul((*m->list)[0]) + (*m->list)[1]); }),
      zoo(
          "weight normalisation by hand", [] { return std::make_shared<WeightNormModel>(); },
          [](auto& m, auto& d) {
            return square_sum(torch::matmul(d.x, (m->g * m->w / m->w.norm(2, 1, true)).t()));
          }),
      zoo(
          "in-place write to a view under no_grad", [] { return nn::Linear(16, 7); },
          [](auto& m, auto& d) {
            {
              torch::NoGradGuard no_grad;
              m->weight.slice(0, 0, 2).zero_();
            }
            return square_sum(m(d.x));
          }),
      zoo(
          "slice and index", [] { return nn::Linear(16, 8); },
          [](auto& m, auto& d) {
            const auto rows = m->weight.index({torch::indexing::Slice(0, 4)});
            return square_sum(d.x.matmul(rows.t()) + m->bias.chunk(2)[0]);
          }),
      zoo(
          "einsum", [] { return nn::Linear(16, 8); },
          [](auto& m, auto& d) {
            return square_sum(torch::einsum("bsd,hd->bsh", {d.x, m->weight}));
          }),
      zoo(
          "cat and stack", [] { return nn::Linear(16, 8); },
          [](auto& m, auto& d) {
            return square_sum(torch::cat({m->weight, m->weight}, 0).matmul(d.x[0].t())) +
                   torch::stack({m->bias, m->bias}).sum();
          }),
  };
}

}  // namespace fsdp::testing
