// Updating and exchanging weights by hand, in the spellings that programs use.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::nn::Linear;

class Weights : public Worlds {};

// A sharded layer beside a plain one. Every rank has the same data.
struct Twins {
  explicit Twins(const DeviceMesh& mesh) { fully_shard(sharded, mesh); }
  void both(const std::function<void(Linear& layer)>& change) {
    change(plain);
    change(sharded);
  }
  void expect_equal() {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(is_dtensor(sharded->parameters()[i]));
      EXPECT_TRUE(
          torch::allclose(full_value(sharded->parameters()[i]), plain->parameters()[i], 1e-5, 1e-7))
          << "parameter " << i;
    }
    torch::NoGradGuard no_grad;
    const auto x = torch::linspace(-1, 1, 10).view({2, 5});
    EXPECT_TRUE(torch::allclose(sharded(x), plain(x), 1e-5, 1e-6)) << "the model sees it too";
  }
  Linear plain = make_linear(5, 7), sharded = make_linear(5, 7);
};

void backward(Linear& layer) {
  layer->zero_grad();
  layer(torch::linspace(-1, 2, 10).view({2, 5})).pow(2).sum().backward();
}

using Update = std::function<void(Tensor& parameter)>;

TEST_P(Weights, AreUpdatedByHandInAnySpelling) {
  const std::vector<std::pair<std::string, Update>> spellings = {
      {"sub_", [](Tensor& p) { p.sub_(p.grad() * 0.1); }},
      {"add_ with alpha", [](Tensor& p) { p.add_(p.grad(), -0.1); }},
      {"-=", [](Tensor& p) { p -= 0.1 * p.grad(); }},
      {"data().sub_", [](Tensor& p) { p.data().sub_(0.1 * p.grad().data()); }},
      {"copy_", [](Tensor& p) { p.copy_(p - 0.1 * p.grad()); }},
      {"set_data", [](Tensor& p) { p.set_data(p.data() - 0.1 * p.grad()); }},
      {"_foreach_add_",
       [](Tensor& p) {
         at::_foreach_add_(std::vector<Tensor>{p}, std::vector<Tensor>{p.grad()}, -0.1);
       }},
      {"addcmul_", [](Tensor& p) { p.addcmul_(p.grad(), torch::full_like(p, 0.1), -1); }}};
  on_ranks([&](const DeviceMesh& mesh) {
    for (const auto& [name, update] : spellings) {
      SCOPED_TRACE(name);
      Twins twins(mesh);
      for (int step = 0; step < 2; ++step) {
        twins.both([&](Linear& layer) {
          backward(layer);
          torch::NoGradGuard no_grad;
          for (auto& parameter : layer->parameters()) update(parameter);
        });
      }
      twins.expect_equal();
    }
  });
}

TEST_P(Weights, AreUpdatedByAnOptimizerFromGradientsThatAProgramChanged) {
  on_ranks([](const DeviceMesh& mesh) {
    Twins twins(mesh);
    twins.both([](Linear& layer) {
      torch::optim::SGD optimizer(layer->parameters(), 0.1);
      backward(layer);
      for (auto& parameter : layer->parameters()) {
        parameter.mutable_grad().mul_(0.5);
        parameter.mutable_grad() = parameter.grad() + 0.25 * parameter.detach();
      }
      optimizer.step();
    });
    twins.expect_equal();
  });
}

// An average of weights takes the model's place for an evaluation, and back.
TEST_P(Weights, AreExchangedWithAnAverage) {
  const std::vector<std::pair<std::string, std::function<void(Tensor&, const Tensor&)>>> ways = {
      {"copy_", [](Tensor& p, const Tensor& value) { p.copy_(value); }},
      {"set_data", [](Tensor& p, const Tensor& value) { p.set_data(value.clone()); }},
      {"data().copy_", [](Tensor& p, const Tensor& value) { p.data().copy_(value); }}};
  on_ranks([&](const DeviceMesh& mesh) {
    for (const auto& [name, put] : ways) {
      SCOPED_TRACE(name);
      Twins twins(mesh);
      twins.both([&](Linear& layer) {
        torch::NoGradGuard no_grad;
        std::vector<Tensor> average, own;
        for (const auto& parameter : layer->parameters())
          average.push_back(parameter.detach().clone());
        {
          torch::AutoGradMode grad_mode(true);
          backward(layer);
        }
        for (auto& parameter : layer->parameters()) parameter.add_(parameter.grad(), -0.1);
        for (size_t i = 0; i < average.size(); ++i) average[i].lerp_(layer->parameters()[i], 0.25);
        for (const auto& parameter : layer->parameters()) own.push_back(parameter.detach().clone());
        for (size_t i = 0; i < average.size(); ++i) put(layer->parameters()[i], average[i]);
      });
      twins.expect_equal();
      twins.both([&](Linear& layer) {
        backward(layer);
        torch::NoGradGuard no_grad;
        for (auto& parameter : layer->parameters()) parameter.add_(parameter.grad(), -0.1);
      });
      twins.expect_equal();
    }
  });
}

TEST_P(Weights, GoIntoOneVectorAndBack) {
  on_ranks([](const DeviceMesh& mesh) {
    Twins twins(mesh);
    Tensor expected;
    {
      auto vector = torch::nn::utils::parameters_to_vector(twins.sharded->parameters());
      expected = torch::nn::utils::parameters_to_vector(twins.plain->parameters()).detach();
      EXPECT_TRUE(torch::equal(full_value(vector.detach()), expected));
      EXPECT_THAT(message_of([&] {
                    torch::nn::utils::vector_to_parameters(vector, twins.sharded->parameters());
                  }),
                  AllOf(HasSubstr("'weight'"), HasSubstr("a graph that uses it is alive")));
    }
    twins.both([&](Linear& layer) {
      torch::nn::utils::vector_to_parameters(expected * 2, layer->parameters());
    });
    twins.expect_equal();
  });
}

TEST_P(Weights, AreResetThroughMembersAndThroughEntries) {
  on_ranks([](const DeviceMesh& mesh) {
    Twins twins(mesh);
    torch::NoGradGuard no_grad;
    twins.both([](Linear& layer) {
      torch::nn::init::constant_(layer->weight, 0.75);
      torch::nn::init::ones_(layer->bias);
    });
    twins.expect_equal();
    twins.both([](Linear& layer) {
      torch::nn::init::eye_(layer->parameters()[0]);
      torch::nn::init::zeros_(layer->parameters()[1]);
    });
    twins.expect_equal();
    const auto fill = [](torch::nn::Module& module) {
      for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(0.5);
    };
    twins.both([&](Linear& layer) { layer->apply(fill); });
    twins.expect_equal();
  });
}

INSTANTIATE_WORLDS(Weights, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
