// Two models that train against each other on one mesh, each with an optimizer of its
// own, beside the unsharded pair.
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

class Adversarial : public Worlds {};

// Start values that differ between models and parameters.
torch::nn::Sequential perceptron(int64_t in, int64_t hidden, int64_t out, double phase) {
  torch::nn::Sequential model(torch::nn::Linear(in, hidden), torch::nn::Tanh(),
                              torch::nn::Linear(hidden, out));
  model->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    const auto steps = torch::arange(parameter.numel(), torch::kDouble);
    parameter.copy_((steps * 1.7 + (phase += 1.0)).sin().view(parameter.sizes()) / 2);
  }
  return model;
}

void shard_layers(torch::nn::Sequential& model, const DeviceMesh& mesh) {
  for (const auto& layer : model->children()) {
    if (!layer->parameters().empty()) fully_shard(*layer, mesh);
  }
  fully_shard(model, mesh);
}

struct Adversaries {
  torch::nn::Sequential generator = perceptron(3, 7, 4, 0.5);
  torch::nn::Sequential discriminator = perceptron(4, 5, 1, 0.25);
  torch::optim::Adam generator_optimizer{Tensors()};
  torch::optim::SGD discriminator_optimizer{Tensors(), 0.1};

  // After fully_shard, since these hold registry entries.
  void make_optimizers() {
    // With eps as large as gradients are, what is rounded stays small.
    generator_optimizer =
        torch::optim::Adam(generator->parameters(), torch::optim::AdamOptions(0.05).eps(1e-3));
    discriminator_optimizer =
        torch::optim::SGD(discriminator->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
};

struct Batch {
  Tensor real, noise;
};

Batch batch_of(int64_t step, int64_t rank) {
  const auto start = 10.0 * static_cast<double>(step) + static_cast<double>(rank);
  return {(torch::arange(24, torch::kDouble) + start).cos().view({6, 4}),
          (torch::arange(18, torch::kDouble) * 0.3 + start).sin().view({6, 3})};
}

// Says 1 of real and 0 of made ones.
Tensor discriminator_loss(Adversaries& a, const Batch& batch) {
  Tensor made;
  {
    torch::NoGradGuard no_grad;
    made = a.generator->forward(batch.noise);
  }
  return torch::softplus(-a.discriminator->forward(batch.real)).mean() +
         torch::softplus(a.discriminator->forward(made)).mean();
}

Tensor generator_loss(Adversaries& a, const Batch& batch) {
  return torch::softplus(-a.discriminator->forward(a.generator->forward(batch.noise))).mean();
}

void set_trains(torch::nn::Sequential& model, bool trains) {
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(trains);
}

// A step of each in turn. `backward` makes gradients of a loss of the batch.
using Loss = Tensor(Adversaries&, const Batch&);
void play(Adversaries& a, bool freeze, const std::function<void(Loss&)>& backward,
          const std::function<void(torch::nn::Sequential& still)>& after) {
  a.discriminator_optimizer.zero_grad();  // of the generator's step
  backward(discriminator_loss);
  a.discriminator_optimizer.step();
  after(a.generator);

  if (freeze) {
    a.discriminator_optimizer.zero_grad();
    set_trains(a.discriminator, false);
  }
  a.generator_optimizer.zero_grad();
  backward(generator_loss);
  a.generator_optimizer.step();
  for (const auto& parameter : a.discriminator->parameters())
    EXPECT_EQ(parameter.grad().defined(), !freeze);
  if (freeze) set_trains(a.discriminator, true);
  after(a.discriminator);
}

Tensors values_of(const torch::nn::Sequential& model) {
  Tensors values;
  for (const auto& parameter : model->parameters()) values.push_back(full_value(parameter).clone());
  return values;
}

void expect_near(const Tensors& actual, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-12)
        << what << ", parameter " << i;
  }
}

// Whoever's turn it is not stays bit for bit as it was.
class Still {
 public:
  explicit Still(Adversaries& a) : a_(a) { remember(); }
  void expect(const torch::nn::Sequential& still) {
    const bool is_generator = still.ptr() == a_.generator.ptr();
    const auto& mover = is_generator ? a_.discriminator : a_.generator;
    EXPECT_TRUE(equal(values_of(still), is_generator ? generator_ : discriminator_));
    EXPECT_FALSE(equal(values_of(mover), is_generator ? discriminator_ : generator_));
    remember();
  }

 private:
  static bool equal(const Tensors& a, const Tensors& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      if (!torch::equal(a[i], b[i])) return false;
    }
    return a.size() == b.size();
  }
  void remember() {
    generator_ = values_of(a_.generator);
    discriminator_ = values_of(a_.discriminator);
  }
  Adversaries& a_;
  Tensors generator_, discriminator_;
};

void expect_the_unsharded_pair(const DeviceMesh& mesh, int64_t rank, bool freeze) {
  Adversaries plain, sharded;
  shard_layers(sharded.generator, mesh);
  shard_layers(sharded.discriminator, mesh);
  plain.make_optimizers();
  sharded.make_optimizers();
  Still still(sharded);
  for (int64_t step = 0; step < 2; ++step) {
    const auto all_ranks = [&](Loss& loss) {
      Tensor sum = torch::zeros({}, torch::kDouble);
      for (int64_t r = 0; r < mesh.size(); ++r) sum = sum + loss(plain, batch_of(step, r));
      (sum / mesh.size()).backward();
    };
    const auto this_rank = [&](Loss& loss) { loss(sharded, batch_of(step, rank)).backward(); };
    play(plain, freeze, all_ranks, [](auto&) {});
    play(sharded, freeze, this_rank, [&](auto& model) {
      still.expect(model);
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    });
    const auto label = "step " + std::to_string(step);
    expect_near(values_of(sharded.generator), values_of(plain.generator), label + ", generator");
    expect_near(values_of(sharded.discriminator), values_of(plain.discriminator),
                label + ", discriminator");
  }
  EXPECT_EQ(counters(mesh).late_reduce_scatters, 0);
}

TEST_P(Adversarial, ModelsWithOptimizersOfTheirOwnTrainAsTheUnshardedPair) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    expect_the_unsharded_pair(mesh, rank, /*freeze=*/false);
  });
}

TEST_P(Adversarial, AFrozenDiscriminatorLetsTheGradientsThroughAndGetsNone) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    expect_the_unsharded_pair(mesh, rank, /*freeze=*/true);
  });
}

INSTANTIATE_WORLDS(Adversarial, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
