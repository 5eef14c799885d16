// What is written where registry entries meet plain tensors: targets and averages that
// are plain take the whole value; what is sharded stays so and keeps its part of what
// ranks have alike.
#include "dtensor/redistribute/comm_listener.h"
#include "fully_shard/counters.h"
#include "tests/fully_shard/no_grad/sharded_layer.h"
#include "tests/fully_shard/support/parity.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// Gathers of units, and what operators on DTensors move.
int64_t moved_in(const DeviceMesh& mesh, const std::function<void()>& body) {
  const auto before = counters(mesh).all_gathers;
  int64_t moved = 0;
  const internal::CommListener listener([&](const internal::CommEvent&) { ++moved; });
  body();
  return moved + counters(mesh).all_gathers - before;
}

class WritesBesideEntries : public Worlds {};

// Reinforcement learning's usual spelling.
TEST_P(WritesBesideEntries, APlainTargetFollowsAShardedModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto plain = layer(), sharded = sharded_layer(mesh);
    const auto expected = layer(), target = layer();
    torch::NoGradGuard no_grad;
    const auto follow = [](Layer& follower, const Layer& model) {
      const auto to = follower.parameters(), from = model.parameters();
      for (size_t i = 0; i < to.size(); ++i) {
        to[i].copy_(0.9 * to[i] + 0.1 * from[i].sin());
        to[i].copy_((1 - 0.25) * to[i] + 0.25 * from[i]);
        to[i].lerp_(from[i] * 2, 0.5);
      }
    };
    follow(*expected, *plain);
    follow(*target, *sharded);
    for (size_t i = 0; i < expected->parameters().size(); ++i)
      EXPECT_TRUE(target->parameters()[i].equal(expected->parameters()[i])) << i;
  });
}

TEST_P(WritesBesideEntries, PenaltiesAndFrozenParametersTrainAsInThePlainModule) {
  const auto build = []() -> Model {
    const auto module = layer();
    module->scale.set_requires_grad(false);
    return {module, [module](const Data& data) {
              auto loss = module->forward(data.x[0]).pow(2).mean();
              const auto parameters = module->parameters();
              for (const auto& p : parameters) loss = loss + 0.1 * p.pow(2).sum();
              for (const auto& p : parameters)
                loss = loss + 0.1 * (p - 0.5 * p.detach().clone()).pow(2).sum();
              const auto mixed = torch::linear(data.x[0], parameters[0]) * (parameters[2] * 2);
              return loss + mixed.mul(parameters[2].sum()).sigmoid().sum();
            }};
  };
  expect_parity(world(), build, shard_whole, "penalties");
}

TEST_P(WritesBesideEntries, AViewThatTheCutDoesNotAllowWritesTheParameter) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto plain = layer(), sharded = sharded_layer(mesh);
    torch::NoGradGuard no_grad;
    for (const auto& model : {plain, sharded}) {
      const auto weight = model->parameters()[0];
      weight[3].zero_();
      weight.slice(0, 1, 3).mul_(2);
      weight.view({2, 40})[1].slice(0, 30, 40).add_(1);
    }
    EXPECT_TRUE(full_value(sharded->parameters()[0]).equal(plain->parameters()[0]));
    EXPECT_TRUE(sharded->forward(own_rows(rank)).equal(plain->forward(own_rows(rank))));
    if (mesh.size() == 1) return;
    const auto error = message_of([&] { sharded->parameters()[0].t().slice(1, 1, 2).zero_(); });
    EXPECT_THAT(error, HasSubstr("of parameter 'weight' can not be written"));
    EXPECT_THAT(error, HasSubstr("SummonFullParams"));
  });
}

// Learning rates, decays and coefficients that are tensors.
TEST_P(WritesBesideEntries, FactorsWithoutDimensionsMoveNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh), plain = layer();
    torch::NoGradGuard no_grad;
    const auto rate = torch::tensor(0.5);
    const auto step = [&](const Tensors& parameters) {
      Tensors averages;
      for (const auto& p : parameters) averages.push_back(p.clone());
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& gradient = parameters[i].grad();
        gradient.mul_(rate).add_(parameters[i], 0.01);
        averages[i].mul_(rate).add_(parameters[i], 0.5);
        parameters[i].mul_(1 - 0.1 * rate).sub_(averages[i]).addcmul_(averages[i], gradient, 0.5);
      }
      at::_foreach_mul_(parameters, rate);
      at::_foreach_add_(parameters, averages, 0.1);
    };
    for (const auto& model : {plain, sharded})
      for (auto& p : model->parameters()) p.mutable_grad() = p.detach().sin();
    step(plain->parameters());
    EXPECT_EQ(moved_in(mesh, [&] { step(sharded->parameters()); }), 0);
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(full_value(sharded->parameters()[i]).equal(plain->parameters()[i])) << i;
  });
}

TEST_P(WritesBesideEntries, OfWhatRanksHaveAlikeKeepThisRanksPart) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh), plain = layer();
    torch::NoGradGuard no_grad;
    const auto mask = own_rows(0).slice(0, 0, 5) > 0;
    for (const auto& model : {plain, sharded}) {
      const auto weight = model->parameters()[0];
      const auto average = weight.clone();
      average.mul_(mask).add_(torch::full({16}, 0.5));
      weight.mul_(mask).add_(average * torch::tensor(2.0));
      at::_foreach_add_({weight}, Tensors{mask.to(torch::kFloat)});
      model->parameters()[1].copy_(average.sum(1));
    }
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(full_value(sharded->parameters()[i]).allclose(plain->parameters()[i])) << i;
  });
}

// Each rank would keep a part of another value.
TEST_P(WritesBesideEntries, OfARanksOwnValuesAreErrorsOnAllRanks) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    if (mesh.size() == 1) return;
    const auto sharded = sharded_layer(mesh);
    const auto before = full_value(sharded->parameters()[0]);
    torch::NoGradGuard no_grad;
    const auto own = own_rows(rank).slice(0, 0, 5), loss = own.mean();
    const auto weight = sharded->parameters()[0];
    const std::vector<std::function<void()>> mistakes{
        [&] { weight.add_(own); },
        [&] { weight.clone().mul_(own); },
        [&] { torch::zeros_like(weight).add_(own); },
        [&] { weight.pow(2).sum().add_(loss); },
        [&] { weight.norm().mul_(loss); },
        [&] { at::_foreach_add_({weight}, Tensors{own}); },
    };
    for (const auto& mistake : mistakes)
      EXPECT_THAT(message_of(mistake), HasSubstr("is not the same on all ranks"));
    EXPECT_THAT(message_of(mistakes[0]), HasSubstr("parameter 'weight'"));
    EXPECT_THAT(message_of(mistakes[3]), HasSubstr("out of place"));
    EXPECT_TRUE(full_value(weight).equal(before));
  });
}

// A learning rate, or a norm, of this rank's own data: the next gather compares them.
TEST_P(WritesBesideEntries, FactorsOfARanksOwnAreErrorsOnAllRanksAtTheNextGather) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    if (mesh.size() == 1) return;
    const auto sharded = sharded_layer(mesh);
    const torch::NoGradGuard no_grad;
    const auto own = torch::tensor(1 + 0.5 * static_cast<double>(rank)), one = torch::tensor(1.0);
    const std::vector<std::function<void(const Tensor&, const Tensor&)>> writes{
        [](const Tensor& p, const Tensor& factor) { p.mul_(factor); },
        [](const Tensor& p, const Tensor& factor) { p.clamp_max_(factor); },
        [](const Tensor& p, const Tensor& factor) { p.slice(1, 0, 2).div_(factor); },
        [](const Tensor& p, const Tensor& factor) { p.lerp_(p * 2, factor); },
        [](const Tensor& p, const Tensor& factor) { at::_foreach_mul_({p}, factor); },
        [](const Tensor& p, const Tensor& factor) { at::_foreach_mul_({p}, Tensors{factor}); }};
    const auto weight = sharded->parameters()[0];
    const auto forward = [&] { sharded->forward(own_rows(0)); };
    for (const auto& write : writes) {
      write(weight, own);
      EXPECT_THAT(message_of<c10::ValueError>(forward),
                  HasSubstr("'weight' of shard rank 1 was written with other tensors"));
      weight.fill_(0.5);
      write(weight, one);
      EXPECT_NO_THROW(forward());
    }
    weight.mul_(own);
    weight.zero_();
    EXPECT_NO_THROW(forward());
  });
}

// A codebook that learns without gradients.
TEST_P(WritesBesideEntries, AtIndicesAreComparedToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh), plain = layer();
    torch::NoGradGuard no_grad;
    struct Write {
      Tensor index, values;
      void to(const Tensor& t) const {
        const auto rows = index.unsqueeze(1).expand({3, 16}), one = index.slice(0, 0, 1);
        t.index_add_(0, index, values);
        t.index_copy_(0, one, values.slice(0, 0, 1));
        t.index_fill_(0, index.slice(0, 1, 2), 0.5);
        t.index_put_({index}, values, /*accumulate=*/true);
        t.scatter_add_(0, rows, values);
        t.scatter_(0, rows.slice(0, 0, 1), values);
        t.scatter_(0, rows.slice(0, 2, 3), 0.25);
      }
    };
    const Write alike{torch::tensor({3, 0, 4}), own_rows(0).slice(0, 0, 3)};
    for (const auto& model : {plain, sharded}) {
      auto sums = torch::zeros_like(model->parameters()[0]);
      alike.to(sums);
      alike.to(model->parameters()[0]);
      model->parameters()[0].add_(sums);
    }
    EXPECT_TRUE(full_value(sharded->parameters()[0]).allclose(plain->parameters()[0]));
    if (mesh.size() == 1) return;
    const Tensor weight = sharded->parameters()[0], sums = torch::zeros_like(weight);
    const auto own = torch::tensor({rank, rank + 1, int64_t{4}});
    const auto own_rows_at = own.unsqueeze(1).expand({3, 16});
    const auto values = own_rows(rank).slice(0, 0, 3);
    const std::vector<std::function<void()>> mistakes{
        [&] { sums.index_add_(0, own, alike.values); },
        [&] { sums.index_add_(0, alike.index, values); },
        [&] { sums.index_copy_(0, own, alike.values); },
        [&] { sums.index_fill_(0, own, 0.5); },
        [&] { sums.index_put_({own}, alike.values); },
        [&] { sums.index_put_({alike.index}, values); },
        [&] { sums.scatter_(0, own_rows_at, alike.values); },
        [&] { sums.scatter_add_(0, own_rows_at, alike.values); },
        [&] { weight.index_add_(0, own, alike.values); },
        [&] { weight.index_put_({alike.index}, values); },
    };
    for (size_t i = 0; i < mistakes.size(); ++i)
      EXPECT_THAT(message_of<c10::ValueError>(mistakes[i]),
                  HasSubstr("is not the same on all ranks"))
          << i;
    EXPECT_TRUE(full_value(weight).allclose(plain->parameters()[0]));
    EXPECT_TRUE(full_value(sums).equal(torch::zeros({5, 16})));
  });
}

TEST_P(WritesBesideEntries, GradientsAndDTensorsOfUsersStandBesideReplicatedTensors) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh);
    sharded->forward(own_rows(0)).sum().backward();
    const auto mask = torch::ones({5, 16});
    EXPECT_TRUE(is_dtensor(sharded->parameters()[0].grad() * mask));
    const DTensor of_user = distribute_tensor(mask, mesh, {Shard{0}});
    EXPECT_TRUE(is_dtensor(of_user * mask));
    EXPECT_TRUE(is_dtensor(of_user + torch::ones({})));
  });
}

TEST_P(WritesBesideEntries, ALeafMadeOfAnEntryIsRefusedBesideAPlainTensorByName) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh);
    const auto leaf = sharded->parameters()[0].detach().clone().set_requires_grad(true);
    EXPECT_THAT(message_of([&] { torch::linear(own_rows(rank), leaf); }),
                HasSubstr("requires grad comes from a sharded parameter"));
    leaf.pow(2).sum().backward();
    EXPECT_TRUE(full_value(leaf.grad()).equal(full_value(leaf) * 2));
  });
}

INSTANTIATE_WORLDS(WritesBesideEntries, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
