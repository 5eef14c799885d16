// What models do with weights besides calling layers: routes, other units' weights,
// normalisation, custom functions, adapters.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ModelCode : public Worlds {};

template <class Module, class Loss>
BuildModel build_of(const Loss& loss) {
  return [loss]() -> Model {
    const auto module = std::make_shared<Module>();
    return {module, [module, loss](const Data& data) { return loss(*module, data); }};
  };
}

struct Experts : nn::Module {
  Experts() {
    for (int i = 0; i < 3; ++i)
      experts.push_back(register_module("expert" + std::to_string(i), nn::Linear(16, 16)));
  }
  // Each row goes where its data says, which differs from rank to rank.
  Tensor forward(const Tensor& rows) {
    const auto route = rows.sum(-1).mul(7).to(torch::kLong).remainder(3).abs();
    auto result = torch::zeros_like(rows);
    for (size_t i = 0; i < experts.size(); ++i) {
      const auto mine = (route == static_cast<int64_t>(i)).nonzero().flatten();
      if (mine.numel() > 0)
        result = result.index_add(0, mine, experts[i](rows.index_select(0, mine)));
    }
    return result;
  }
  std::vector<nn::Linear> experts;
};

TEST_P(ModelCode, ExpertsWithARouteOfEachRanksOwnAreOneUnit) {
  const auto build = build_of<Experts>([](Experts& model, const Data& data) {
    return model.forward(data.x.view({-1, 16})).pow(2).sum();
  });
  expect_parity(world(), build, shard_whole, "experts");
}

struct Borrower : nn::Module {
  Tensor forward(const Tensor& x) {
    const auto y = torch::linear(torch::tanh(lender(x)), lender->weight.t());
    return own(y) + lender->bias.sum() + torch::linear(x, own->weight);
  }
  nn::Linear lender = register_module("lender", nn::Linear(16, 12));
  nn::Linear own = register_module("own", nn::Linear(16, 8));
};

TEST_P(ModelCode, WeightsOfOtherUnitsAreUsedInPassing) {
  const auto build = build_of<Borrower>(
      [](Borrower& model, const Data& data) { return model.forward(data.x).pow(2).sum(); });
  expect_parity(world(), build, shard_children, "borrower");
}

// By power iteration, from the same start each time.
struct SpectralNorm : nn::Module {
  Tensor forward(const Tensor& x) {
    auto u = torch::ones({8}), v = torch::ones({16});
    {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i) {
        v = weight.t().mv(u);
        v = v / v.norm();
        u = weight.mv(v);
        u = u / u.norm();
      }
    }
    return torch::linear(x, weight / u.dot(weight.mv(v)));
  }
  Tensor weight = register_parameter("weight", torch::randn({8, 16}));
};

TEST_P(ModelCode, SpectralNormalisationReadsTheWholeWeight) {
  const auto build = build_of<SpectralNorm>(
      [](SpectralNorm& model, const Data& data) { return model.forward(data.x).pow(2).sum(); });
  expect_parity(world(), build, shard_whole, "spectral norm");
}

// x W^T, saving the weight, a detached one, or its transpose.
enum class Saves { kWeight, kDetached, kTransposed };
template <Saves saves>
struct Product : torch::autograd::Function<Product<saves>> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight) {
    Tensor kept = weight;
    if (saves == Saves::kDetached) kept = weight.detach();
    if (saves == Saves::kTransposed) kept = weight.t();
    context->save_for_backward({x, kept});
    return x.mm(weight.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto weight = saves == Saves::kTransposed ? saved[1].t() : saved[1];
    return {gradients[0].mm(weight), gradients[0].t().mm(saved[0])};
  }
};

struct Functions : nn::Module {
  Tensor forward(const Tensor& x) {
    auto y = torch::tanh(Product<Saves::kWeight>::apply(x, a->weight));
    y = torch::tanh(Product<Saves::kDetached>::apply(y, b->weight));
    return Product<Saves::kTransposed>::apply(y, c->weight);
  }
  nn::Linear a = register_module("a", nn::Linear(nn::LinearOptions(16, 8).bias(false))),
             b = register_module("b", nn::Linear(nn::LinearOptions(8, 8).bias(false))),
             c = register_module("c", nn::Linear(nn::LinearOptions(8, 5).bias(false)));
};

TEST_P(ModelCode, CustomFunctionsSaveWeightsInAnyForm) {
  const auto build = build_of<Functions>([](Functions& model, const Data& data) {
    return model.forward(data.x.view({-1, 16})).pow(2).sum();
  });
  expect_parity(world(), build, shard_children, "functions");
}

struct Clipped : nn::Module {
  Tensor forward(const Tensor& x) {
    {
      torch::NoGradGuard no_grad;
      layer->weight.clamp_(-0.1, 0.1);  // as in a Wasserstein critic
    }
    return layer(x);
  }
  nn::Linear layer = register_module("layer", nn::Linear(16, 7));
};

TEST_P(ModelCode, WeightsThatForwardClipsStayClipped) {
  const auto build = build_of<Clipped>(
      [](Clipped& model, const Data& data) { return model.forward(data.x).pow(2).sum(); });
  // The loss clips the plain model once for every rank's data, which changes nothing.
  expect_parity(world(), build, shard_whole, "clipped");
}

struct Adapted : nn::Module {
  Tensor forward(const Tensor& x) { return base(x) + (adapter ? adapter(x) : torch::zeros({})); }
  nn::Linear base = register_module("base", make_linear(4, 4));
  nn::Linear adapter{nullptr};
};

// The base is frozen and sharded before; the adapter and a new root come later.
TEST_P(ModelCode, AnAdapterUnderANewRootTrainsBesideAFrozenBase) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto inner = std::make_shared<Adapted>();
    fully_shard(inner->base, mesh);
    for (auto& parameter : inner->parameters()) parameter.set_requires_grad(false);
    inner->forward(torch::ones({1, 4}));
    inner->adapter = inner->register_module("adapter", make_linear(4, 4));
    fully_shard(inner->adapter, mesh);
    fully_shard(inner, mesh);
    EXPECT_FALSE(get_fsdp_module(*inner->base).is_root());
    torch::optim::SGD optimizer(inner->adapter->parameters(), 0.1);
    const auto before = full_value(inner->base->parameters()[0]);
    for (int step = 0; step < 2; ++step) {
      const auto reductions = counters(mesh).reduce_scatters;
      optimizer.zero_grad();
      inner->forward(torch::ones({1, 4})).sum().backward();
      optimizer.step();
      EXPECT_EQ(counters(mesh).reduce_scatters - reductions, mesh.size() == 1 ? 0 : 1);
    }
    EXPECT_TRUE(torch::equal(full_value(inner->base->parameters()[0]), before));
    EXPECT_TRUE(
        torch::allclose(full_gradient(inner->adapter->parameters()[0]), torch::ones({4, 4})));
  });
}

INSTANTIATE_WORLDS(ModelCode, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
