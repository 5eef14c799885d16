// Layers that are given registry entries where no gradients are recorded compute what
// they compute with the plain parameters.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;

class EntriesInEvaluation : public Worlds {};

// Parameters, by their shapes, and what is computed with them.
struct LayerCall {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
  std::function<torch::Tensor(const Tensors& parameters, const Data& data)> compute;
};

const std::vector<LayerCall>& layer_calls() {
  using P = const Tensors&;
  using D = const Data&;
  static const std::vector<LayerCall> calls{
      {"linear", {{5, 16}, {5}}, [](P p, D d) { return torch::linear(d.x, p[0], p[1]); }},
      {"linear without bias", {{5, 16}}, [](P p, D d) { return torch::linear(d.x, p[0]); }},
      {"matmul from the right", {{16, 5}}, [](P p, D d) { return torch::matmul(d.x, p[0]); }},
      {"matmul from the left", {{5, 8}}, [](P p, D d) { return torch::matmul(p[0], d.x); }},
      {"matmul with a vector", {{16}}, [](P p, D d) { return torch::matmul(d.x, p[0]); }},
      {"mm", {{16, 5}}, [](P p, D d) { return torch::mm(d.x[0], p[0]); }},
      {"addmm", {{5}, {16, 5}}, [](P p, D d) { return torch::addmm(p[0], d.x[0], p[1]); }},
      {"bmm", {{4, 16, 5}}, [](P p, D d) { return torch::bmm(d.x, p[0]); }},
      {"conv1d", {{5, 3, 3}, {5}}, [](P p, D d) { return torch::conv1d(d.sequence, p[0], p[1]); }},
      {"conv2d", {{5, 3, 3, 3}, {5}}, [](P p, D d) { return torch::conv2d(d.image, p[0], p[1]); }},
      {"conv2d without bias",
       {{5, 3, 3, 3}},
       [](P p, D d) { return torch::conv2d(d.image, p[0]); }},
      {"grouped conv2d",
       {{6, 1, 3, 3}, {6}},
       [](P p, D d) { return torch::conv2d(d.image, p[0], p[1], 2, 1, 1, /*groups=*/3); }},
      {"conv3d", {{5, 3, 2, 2, 2}}, [](P p, D d) { return torch::conv3d(d.volume, p[0]); }},
      {"transposed conv2d",
       {{3, 5, 2, 2}, {5}},
       [](P p, D d) { return torch::conv_transpose2d(d.image, p[0], p[1], 2); }},
      {"embedding", {{10, 5}}, [](P p, D d) { return torch::embedding(p[0], d.index); }},
      {"embedding_bag",
       {{10, 5}},
       [](P p, D d) {
         return torch::nn::functional::embedding_bag(
             d.index, p[0], torch::nn::functional::EmbeddingBagFuncOptions().mode(torch::kSum));
       }},
  };
  return calls;
}

// A model without members: its forward looks its weights up by name.
struct NamedModel : torch::nn::Module {
  NamedModel() {
    register_parameter("table", torch::randn({10, 6}));
    register_parameter("kernel", torch::randn({7, 3, 3, 3}) / 4);
    register_parameter("offset", torch::randn({7}));
    register_parameter("w", torch::randn({6, 7}) / 2);
    register_parameter("b", torch::randn({6}));
  }
  torch::Tensor forward(const Data& data) {
    const auto image =
        torch::conv2d(data.image, named_parameters()["kernel"], named_parameters()["offset"]);
    const auto hidden = torch::linear(torch::tanh(image).mean({2, 3}), named_parameters()["w"],
                                      named_parameters()["b"]);
    const auto words = torch::embedding(named_parameters()["table"], data.index);
    return words.matmul(hidden.t());
  }
};

torch::Tensor evaluated(NamedModel& model, const Data& data) {
  torch::NoGradGuard no_grad;
  return model.forward(data);
}

torch::Tensor inferred(NamedModel& model, const Data& data) {
  c10::InferenceMode inference;
  return model.forward(data);
}

TEST_P(EntriesInEvaluation, GiveEveryLayerThePlainNumbers) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto data = make_data(3);
    for (const auto& call : layer_calls()) {
      SCOPED_TRACE(call.name);
      auto generator = at::detail::createCPUGenerator(17);
      const auto module = std::make_shared<torch::nn::Module>();
      Tensors plain;
      for (const auto& shape : call.shapes) {
        plain.push_back(at::randn(shape, generator).requires_grad_());
        module->register_parameter("p" + std::to_string(plain.size()),
                                   plain.back().detach().clone());
      }
      fully_shard(*module, mesh);
      const auto entries = module->parameters();
      const auto expect_plain = [&] {
        const auto expected = call.compute(plain, data), actual = call.compute(entries, data);
        EXPECT_FALSE(is_dtensor(actual));
        EXPECT_TRUE(torch::equal(actual, expected));
      };
      {
        SCOPED_TRACE("no_grad");
        torch::NoGradGuard no_grad;
        expect_plain();
      }
      {
        SCOPED_TRACE("inference mode");
        c10::InferenceMode inference;
        expect_plain();
      }
    }
  });
}

TEST_P(EntriesInEvaluation, AModelThatLooksItsWeightsUpEvaluatesAsThePlainOne) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    std::shared_ptr<NamedModel> plain, model;
    build_seeded([&] { return Model{plain = std::make_shared<NamedModel>(), {}}; });
    build_seeded([&] { return Model{model = std::make_shared<NamedModel>(), {}}; });
    fully_shard(*model, mesh);
    const auto mine = make_data(3 + static_cast<uint64_t>(rank));
    for (const auto& evaluate : {evaluated, inferred}) {
      const auto actual = evaluate(*model, mine);
      EXPECT_FALSE(is_dtensor(actual));
      EXPECT_TRUE(torch::equal(actual, evaluate(*plain, mine)));
    }
  });
}

// Every loss has what the evaluations gave in it, also that of the second step.
TEST_P(EntriesInEvaluation, OfAModelThatLooksItsWeightsUpGoOnBetweenStepsOfTraining) {
  const auto build = []() -> Model {
    const auto module = std::make_shared<NamedModel>();
    return {module, [module](const Data& data) {
              const auto evaluation = evaluated(*module, data).pow(2).sum().item<double>() +
                                      inferred(*module, data).abs().sum().item<double>();
              return module->forward(data).pow(2).sum() + evaluation;
            }};
  };
  expect_parity(world(), build, shard_whole, "weights looked up by name");
}

INSTANTIATE_WORLDS(EntriesInEvaluation, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
