// Registry entries in operators outside autograd: with plain tensors they are whole,
// among themselves they stay sharded.
#include "fully_shard/counters.h"
#include "tests/fully_shard/support/parity.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

namespace fsdp::testing {
namespace {

torch::Tensor batch_of(const Data& data) { return data.x[0]; }

// A model that has no members: its weights are in lists.
struct ListModel : torch::nn::Module {
  ListModel() {
    weights->append((torch::randn({5, 16}) / 4).requires_grad_());
    weights->append(torch::randn({3, 5}).requires_grad_());
    weights->append(torch::randn({3}).requires_grad_());
    register_module("weights", weights);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = torch::tanh(torch::nn::functional::linear(x, weights[0]));
    return hidden.mm(weights[1].t()) + weights[2];
  }
  torch::nn::ParameterList weights;
};

// Multiplies by a weight, and by a view of it in backward.
struct Multiply : torch::autograd::Function<Multiply> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0].mm(saved[1]), grads[0].t().mm(saved[0])};
  }
};

Model list_model(const std::function<void(ListModel&)>& change = [](ListModel&) {}) {
  const auto module = std::make_shared<ListModel>();
  change(*module);
  return {module,
          [module](const Data& data) { return module->forward(batch_of(data)).pow(2).sum(); }};
}

class EntriesWithoutGrad : public Worlds {};

// One sharded list model beside an unsharded one of the same values.
struct ListModels {
  explicit ListModels(const DeviceMesh& mesh)
      : plain(build_seeded([] { return list_model(); })),
        sharded(build_seeded([] { return list_model(); })) {
    fully_shard(*sharded.module, mesh);
  }
  std::vector<torch::Tensor> plain_values() const { return plain.module->parameters(); }
  std::vector<torch::Tensor> entries() const { return sharded.module->parameters(); }

  Model plain, sharded;
};

int64_t gathers_of(const DeviceMesh& mesh, const std::function<void()>& body) {
  const auto before = counters(mesh).all_gathers;
  body();
  return counters(mesh).all_gathers - before;
}

TEST_P(EntriesWithoutGrad, AParameterListModelEvaluatesAsThePlainOne) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    const auto data = make_data(3);
    {
      torch::NoGradGuard no_grad;
      const auto loss = pair.sharded.loss(data);
      EXPECT_FALSE(is_dtensor(loss));
      EXPECT_TRUE(loss.equal(pair.plain.loss(data)));
    }
    {
      c10::InferenceMode inference;
      EXPECT_TRUE(pair.sharded.loss(data).equal(pair.plain.loss(data)));
    }
  });
}

TEST_P(EntriesWithoutGrad, TrainingGoesOnBetweenEvaluations) {
  expect_parity(
      world(),
      [] {
        auto model = list_model();
        const auto loss = model.loss;
        model.loss = [loss](const Data& data) {
          {
            torch::NoGradGuard no_grad;
            loss(data);
          }
          return loss(data);
        };
        return model;
      },
      shard_whole, "evaluation before every forward");
}

TEST_P(EntriesWithoutGrad, AFrozenElementIsWholeInTraining) {
  for (const size_t frozen : {0, 1}) {
    const auto build = [frozen] {
      return list_model(
          [frozen](ListModel& model) { model.weights[frozen].set_requires_grad(false); });
    };
    expect_parity(world(), build, shard_whole, "frozen element " + std::to_string(frozen));
  }
}

TEST_P(EntriesWithoutGrad, ACustomFunctionTrainsTheEntryThatItIsGiven) {
  const auto build = []() -> Model {
    const auto module = std::make_shared<ListModel>();
    return {module, [module](const Data& data) {
              return Multiply::apply(
                         torch::tanh(Multiply::apply(batch_of(data), module->weights[0])),
                         module->weights[1])
                  .pow(2)
                  .sum();
            }};
  };
  expect_parity(world(), build, shard_whole, "custom function");
}

TEST_P(EntriesWithoutGrad, OneParameterThroughAFunctionAndOutsideOfItGetsBothGradients) {
  const auto build = []() -> Model {
    const auto module = std::make_shared<ListModel>();
    return {module, [module](const Data& data) {
              const auto& weight = module->weights[0];
              return Multiply::apply(batch_of(data), weight).sum() +
                     batch_of(data).mm(weight.t()).pow(2).sum() + module->weights[1].sum();
            }};
  };
  expect_parity(world(), build, shard_whole, "both ways");
}

TEST_P(EntriesWithoutGrad, OptimizerStepsStayShardedAndBitEqual) {
  using Parameters = std::vector<torch::Tensor>;
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;
  const std::vector<Make> optimizers{
      [](const Parameters& p) { return std::make_unique<torch::optim::AdamW>(p, 1e-2); },
      [](const Parameters& p) {
        return std::make_unique<torch::optim::SGD>(
            p, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
      }};
  on_ranks([&](const DeviceMesh& mesh) {
    for (const auto& make : optimizers) {
      const ListModels pair(mesh);
      const auto plain = pair.plain_values(), entries = pair.entries();
      const auto plain_optimizer = make(plain), optimizer = make(entries);
      for (size_t i = 0; i < plain.size(); ++i) {
        plain[i].mutable_grad() = plain[i].detach().sin();
        entries[i].mutable_grad() = distribute_tensor(plain[i].grad(), mesh, {Shard{0}});
      }
      for (int step = 0; step < 3; ++step) {
        plain_optimizer->step();
        EXPECT_EQ(gathers_of(mesh, [&] { optimizer->step(); }), 0);
      }
      for (size_t i = 0; i < plain.size(); ++i)
        EXPECT_TRUE(DTensor(entries[i]).full_tensor().equal(plain[i])) << i;
    }
  });
}

TEST_P(EntriesWithoutGrad, ForeachAmongEntriesStaysSharded) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    torch::NoGradGuard no_grad;
    const auto entries = pair.entries(), plain = pair.plain_values();
    EXPECT_EQ(gathers_of(mesh,
                         [&] {
                           const auto average = at::_foreach_mul(entries, 0.5);
                           at::_foreach_lerp_(average, entries, 0.25);
                           at::_foreach_add_(entries, average, 2);
                           for (const auto& entry : average) EXPECT_TRUE(is_dtensor(entry));
                         }),
              0);
    const auto average = at::_foreach_mul(plain, 0.5);
    at::_foreach_lerp_(average, plain, 0.25);
    at::_foreach_add_(plain, average, 2);
    for (size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(DTensor(entries[i]).full_tensor().equal(plain[i])) << i;
    const auto sums = at::_foreach_add(entries, plain);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_FALSE(is_dtensor(sums[i]));
      EXPECT_TRUE(sums[i].equal(plain[i] + plain[i])) << i;
    }
  });
}

TEST_P(EntriesWithoutGrad, ComparesWithPlainTensors) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    torch::NoGradGuard no_grad;
    const auto entry = pair.entries()[0], plain = pair.plain_values()[0];
    EXPECT_TRUE((entry == plain).all().item<bool>());
    EXPECT_TRUE(torch::allclose(entry, plain));
    EXPECT_TRUE(torch::allclose(plain, entry));
    EXPECT_TRUE(torch::equal(entry, plain));
    const auto other = plain.clone();
    other[4][1] += 1;
    EXPECT_FALSE((entry == other).all().item<bool>());
    EXPECT_FALSE(torch::allclose(entry, other));
  });
}

// But not numbers that the code writes.
TEST_P(EntriesWithoutGrad, CountsEveryPlainOperandWhateverItsNumberOfElements) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    torch::NoGradGuard no_grad;
    const auto entry = pair.entries()[0];
    EXPECT_EQ(gathers_of(mesh,
                         [&] {
                           EXPECT_TRUE(is_dtensor(entry * 2));
                           EXPECT_TRUE(is_dtensor(entry * 2.5 - 1));
                           EXPECT_TRUE(is_dtensor(entry + entry));
                           EXPECT_TRUE(is_dtensor(entry.t()));
                           EXPECT_TRUE(is_dtensor(entry.clone()));
                         }),
              0);
    for (const auto& two : {torch::full({1}, 2.0), torch::tensor(2.0)}) {
      const auto twice = entry * two;
      EXPECT_FALSE(is_dtensor(twice));
      EXPECT_TRUE(twice.equal(pair.plain_values()[0] * 2));
    }
  });
}

TEST_P(EntriesWithoutGrad, ViewsOfEntriesAreWholeToo) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    torch::NoGradGuard no_grad;
    const auto entry = pair.entries()[0], plain = pair.plain_values()[0];
    const auto x = batch_of(make_data(3));
    EXPECT_TRUE(x.mm(entry.t()).equal(x.mm(plain.t())));
    EXPECT_TRUE(x.matmul(entry.detach().t()).equal(x.matmul(plain.t())));
    EXPECT_TRUE((entry.unsqueeze(0) + torch::ones({2, 1, 1}))
                    .equal(plain.unsqueeze(0) + torch::ones({2, 1, 1})));
  });
}

TEST_P(EntriesWithoutGrad, AWriteDecidesWhereTheResultLies) {
  on_ranks([&](const DeviceMesh& mesh) {
    const ListModels pair(mesh);
    torch::NoGradGuard no_grad;
    const auto entry = pair.entries()[0], plain = pair.plain_values()[0];
    auto copy = torch::zeros_like(plain);
    copy.copy_(entry);
    EXPECT_TRUE(copy.equal(plain));
    copy.add_(entry, 2);
    EXPECT_TRUE(copy.equal(plain + 2 * plain));
    EXPECT_EQ(gathers_of(mesh, [&] { entry.copy_(copy); }), 0);
    EXPECT_TRUE(is_dtensor(entry));
    EXPECT_TRUE(DTensor(entry).full_tensor().equal(copy));
  });
}

INSTANTIATE_WORLDS(EntriesWithoutGrad, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
