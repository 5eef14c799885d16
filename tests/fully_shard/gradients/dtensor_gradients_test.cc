// Gradients that come to members as DTensors: members and entries beside sharded values
// in a loss. Each rank has data of its own, and the gradients are those of the mean of
// the ranks' losses, computed unsharded.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

// Of a layer [5, 4]: uneven over 2 and 3 ranks, and empty parts of the bias over none.
constexpr int64_t kIn = 4, kOut = 5;

torch::nn::Linear make_layer() {
  auto layer = make_linear(kIn, kOut);
  layer->to(torch::kFloat64);
  return layer;
}

Tensor rows_of(int64_t rank) {
  const auto numbers = torch::arange(2 * kIn, torch::kFloat64).reshape({2, kIn});
  return (numbers - 3) * static_cast<double>(rank + 1) / 7;
}

// What a layer is to stay near: values, and how much they count.
struct Anchor {
  std::vector<Tensor> values, weights;
};

Anchor anchor_of(const torch::nn::Linear& layer) {
  const torch::NoGradGuard no_grad;
  Anchor anchor;
  for (const auto& parameter : layer->parameters()) {
    const auto whole = full_value(parameter);
    anchor.values.push_back(whole.cos());
    anchor.weights.push_back(whole.abs() + 1);
  }
  return anchor;
}

Anchor distributed(const Anchor& anchor, const DeviceMesh& mesh,
                   const std::vector<Placement>& placements) {
  Anchor result;
  for (const auto& value : anchor.values)
    result.values.push_back(distribute_tensor(value, mesh, placements));
  for (const auto& weight : anchor.weights)
    result.weights.push_back(distribute_tensor(weight, mesh, placements));
  return result;
}

using Loss = std::function<Tensor(const torch::nn::Linear& layer, const Tensor& x)>;

Tensor own_loss(const torch::nn::Linear& layer, const Tensor& x) {
  return torch::tanh(torch::nn::functional::linear(x, layer->weight, layer->bias)).pow(2).sum();
}

// Elastic weight consolidation; with weights of one: FedProx.
Tensor penalty(const std::vector<Tensor>& parameters, const Anchor& anchor) {
  auto sum = (anchor.weights[0] * (parameters[0] - anchor.values[0]).pow(2)).sum();
  return sum + (anchor.weights[1] * (parameters[1] - anchor.values[1]).pow(2)).sum();
}

Loss elastic_loss(const Anchor& anchor) {
  return [anchor](const torch::nn::Linear& layer, const Tensor& x) {
    return own_loss(layer, x) + 0.3 * penalty(layer->parameters(), anchor);
  };
}

// The gradients of the mean of the ranks' losses.
std::vector<Tensor> expected_layer_gradients(int64_t world, torch::nn::Linear layer,
                                             const Loss& loss) {
  layer->zero_grad();
  for (int64_t rank = 0; rank < world; ++rank)
    (loss(layer, rows_of(rank)) / static_cast<double>(world)).backward();
  std::vector<Tensor> gradients;
  for (const auto& parameter : layer->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

void expect_layer_gradients(const torch::nn::Linear& layer, const std::vector<Tensor>& expected,
                            double times = 1) {
  const auto parameters = layer->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto gradient = full_gradient(parameters[i]);
    ASSERT_EQ(gradient.defined(), expected[i].defined()) << i;
    if (gradient.defined()) {
      EXPECT_TRUE(torch::allclose(gradient, expected[i] * times, 1e-12, 1e-14))
          << gradient << expected[i];
    }
  }
}

class DTensorGradients : public Worlds {};

TEST_P(DTensorGradients, OfAPenaltyOverEntriesOfWhichSomeAreFrozen) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const Loss loss = [](const torch::nn::Linear& layer, const Tensor& x) {
      auto sum = own_loss(layer, x);
      for (const auto& parameter : layer->parameters()) sum = sum + 0.1 * parameter.pow(2).sum();
      return sum;
    };
    auto plain = make_layer(), sharded = make_layer();
    for (auto* layer : {&plain, &sharded}) (*layer)->bias.set_requires_grad(false);
    fully_shard(sharded, mesh);
    loss(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected_layer_gradients(world(), plain, loss));
  });
}

TEST_P(DTensorGradients, OfTheDistanceToWhatTheEntriesWere) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    fully_shard(sharded, mesh);
    const auto loss_of = [](const torch::nn::Linear& layer) {
      Anchor before{.values = {}, .weights = {torch::ones({}), torch::ones({})}};
      for (const auto& parameter : layer->parameters())
        before.values.push_back(parameter.detach().clone());
      const torch::NoGradGuard no_grad;
      for (auto parameter : layer->parameters()) parameter.add_(0.25);
      return elastic_loss(before);
    };
    const auto plain_loss = loss_of(plain), sharded_loss = loss_of(sharded);
    sharded_loss(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected_layer_gradients(world(), plain, plain_loss));
  });
}

// Own parts, terms and whole values, as the anchor lies.
TEST_P(DTensorGradients, OfAWeightedDistanceToDistributedValues) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer();
    const auto anchor = anchor_of(plain);
    const auto expected = expected_layer_gradients(world(), plain, elastic_loss(anchor));
    for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
      auto sharded = make_layer();
      fully_shard(sharded, mesh);
      elastic_loss(distributed(anchor, mesh, {placement}))(sharded, rows_of(rank)).backward();
      expect_layer_gradients(sharded, expected);
    }
  });
}

TEST_P(DTensorGradients, OfMembersAndViewsOfThem) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    const auto anchor = anchor_of(plain);
    const auto loss_near = [](const Anchor& near) -> Loss {
      return [near](const torch::nn::Linear& layer, const Tensor& x) {
        return own_loss(layer, x) + (layer->weight.t() * near.values[0].t()).sum() +
               (layer->bias - near.values[1]).pow(2).sum();
      };
    };
    fully_shard(sharded, mesh);
    loss_near(distributed(anchor, mesh, {Shard{0}}))(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected_layer_gradients(world(), plain, loss_near(anchor)));
  });
}

// A batch that is one DTensor: every rank computes its rows, so gradients are terms.
TEST_P(DTensorGradients, OfABatchThatIsCut) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    fully_shard(sharded, mesh);
    const auto batch = torch::cat({rows_of(0), rows_of(1), rows_of(2)});
    own_loss(sharded, distribute_tensor(batch, mesh, {Shard{0}})).backward();
    own_loss(plain, batch).backward();
    expect_layer_gradients(sharded, {plain->weight.grad(), plain->bias.grad()});
  });
}

TEST_P(DTensorGradients, AddUpWithoutSynchronisationAndOverRetainedGraphs) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    const auto anchor = anchor_of(plain);
    const auto expected = expected_layer_gradients(world(), plain, elastic_loss(anchor));
    const auto loss = elastic_loss(distributed(anchor, mesh, {Shard{0}}));
    auto unit = fully_shard(sharded, mesh);
    {
      const NoSyncGuard no_sync(unit);
      loss(sharded, rows_of(rank)).backward();
    }
    const auto again = loss(sharded, rows_of(rank));
    again.backward({}, /*retain_graph=*/true);
    again.backward();
    expect_layer_gradients(sharded, expected, 3);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(DTensorGradients, InMixedPrecision) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    const auto anchor = anchor_of(plain);
    const auto expected = expected_layer_gradients(world(), plain, elastic_loss(anchor));
    sharded->to(torch::kFloat32);
    auto unit = fully_shard(
        sharded, mesh,
        {.mp_policy = {.param_dtype = torch::kFloat64, .reduce_dtype = torch::kFloat64}});
    const auto loss = elastic_loss(distributed(anchor, mesh, {Shard{0}}));
    {
      const NoSyncGuard no_sync(unit);
      loss(sharded, rows_of(rank)).backward();
    }
    loss(sharded, rows_of(rank)).backward();
    const auto gradient = full_gradient(sharded->parameters()[0]);
    EXPECT_EQ(gradient.scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(gradient.to(torch::kFloat64), expected[0] * 2, 1e-5, 1e-6));
  });
}

TEST_P(DTensorGradients, OfAPlainIntermediateComeWhole) {
  for (const Placement placement :
       {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})})
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      auto plain = make_layer(), sharded = make_layer();
      const auto near = [](const Anchor& anchor) {
        return [anchor](const torch::nn::Linear& layer, const Tensor& x) {
          return own_loss(layer, x) + (layer->weight * 2 - anchor.values[0]).pow(2).sum();
        };
      };
      const Anchor anchor = anchor_of(plain);
      Anchor in_parts = anchor;
      in_parts.values[0] = distribute_tensor(anchor.values[0], mesh, {placement});
      fully_shard(sharded, mesh);
      near(in_parts)(sharded, rows_of(rank)).backward();
      expect_layer_gradients(sharded, expected_layer_gradients(world(), plain, near(anchor)));
    });
}

// What can not be added up is an error, and the next backward knows nothing of it.
TEST_P(DTensorGradients, InPartsThatTheCallerGivesAreRefusedByNameAndLeaveNothing) {
  if (world() == 1) return;  // a part is the whole
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_layer(), sharded = make_layer();
    const auto anchor = distributed(anchor_of(plain), mesh, {Shard{0}});
    const auto expected = expected_layer_gradients(world(), plain, own_loss);
    auto unit = fully_shard(sharded, mesh);
    const auto refused = [&] {
      return message_of([&] { (sharded->weight * 2).backward(anchor.values[0]); });
    };
    const auto names_it = AllOf(HasSubstr("'weight'"), HasSubstr("Shard(0)"),
                                HasSubstr("full_tensor()"), HasSubstr("rank"));
    EXPECT_THAT(refused(), names_it);
    own_loss(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected);
    {
      const NoSyncGuard no_sync(unit);
      EXPECT_THAT(refused(), names_it);
    }
    own_loss(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected, 2);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(DTensorGradients, AreNotDifferentiatedAgain) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto layer = make_layer();
    const auto anchor = distributed(anchor_of(layer), mesh, {Shard{0}});
    fully_shard(layer, mesh);
    const auto far = penalty({layer->weight, layer->bias}, anchor);
    expect_error<c10::NotImplementedError>(
        [&] { torch::autograd::grad({far}, {layer->weight}, {}, true, true); },
        AllOf(HasSubstr("'weight'"), HasSubstr("full_tensor()")));
  });
}

INSTANTIATE_WORLDS(DTensorGradients, 1, 2, 3);

TEST(DTensorGradientsOfReplicas, CountOncePerRankOfBothDimensions) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    auto plain = make_layer(), sharded = make_layer();
    const auto anchor = anchor_of(plain);
    fully_shard(sharded, mesh);
    const auto near = distributed(anchor, mesh, {Replicate{}, Shard{0}});
    elastic_loss(near)(sharded, rows_of(rank)).backward();
    expect_layer_gradients(sharded, expected_layer_gradients(4, plain, elastic_loss(anchor)));
  });
}

}  // namespace
}  // namespace fsdp::testing
