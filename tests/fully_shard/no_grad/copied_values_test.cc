// Plain values that are copied into sharded parameters, of which each rank keeps its
// part: what differs between ranks is an error by name, never a mixture.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/constant_layer.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

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

using Copy = std::function<void(Tensor& entry, const Tensor& value)>;

const std::vector<std::pair<std::string, Copy>>& copies() {
  static const std::vector<std::pair<std::string, Copy>> copies = {
      {"copy_", [](Tensor& p, const Tensor& value) { p.copy_(value); }},
      {"data().copy_", [](Tensor& p, const Tensor& value) { p.data().copy_(value); }},
      {"copy_ of a row", [](Tensor& p, const Tensor& value) { p.copy_(value[0]); }},
      {"_foreach_copy_",
       [](Tensor& p, const Tensor& value) {
         at::_foreach_copy_(std::vector<Tensor>{p}, std::vector<Tensor>{value});
       }},
      {"fill_", [](Tensor& p, const Tensor& value) { p.fill_(value[0][0]); }},
      {"set_", [](Tensor& p, const Tensor& value) { p.set_(value); }},
      {"set_data", [](Tensor& p, const Tensor& value) { p.set_data(value.clone()); }}};
  return copies;
}

class CopiedValues : public Worlds {};

TEST_P(CopiedValues, ThatDifferAreNamedOnEveryRankAndAreMendedByTheSame) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto x = torch::ones({1, 6});
    const torch::NoGradGuard no_grad;
    for (const auto& [name, copy] : copies()) {
      SCOPED_TRACE(name);
      auto layer = constant_layer(6);
      fully_shard(layer, mesh);
      layer(x);
      auto entry = layer->parameters()[0];
      copy(entry, torch::full({6, 6}, rank == 1 ? 2.0 : 3.0));
      EXPECT_THAT(message_of<c10::ValueError>([&] { layer(x); }),
                  AllOf(HasSubstr("'weight' of shard rank 1 was given other values"),
                        HasSubstr("(rank " + std::to_string(rank) + ")")));
      copy(entry, torch::full({6, 6}, 0.25));
      EXPECT_NO_THROW(layer(x));
      EXPECT_TRUE(full_value(layer->parameters()[0]).equal(torch::full({6, 6}, 0.25)));
    }
  });
}

// Of a part each rank keeps what lies in its own, so nothing is left to compare later.
TEST_P(CopiedValues, ThatDifferInAPartOfAParameterAreErrorsAtOnce) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    const auto entry = layer->parameters()[0];
    const auto columns = entry.slice(1, 0, 2);
    const auto own = torch::full({6, 2}, static_cast<double>(rank));
    for (const auto& copy : std::vector<std::function<void()>>{
             [&] { columns.copy_(own); },
             [&] { at::_foreach_copy_(std::vector<Tensor>{columns}, std::vector<Tensor>{own}); }})
      EXPECT_THAT(message_of<c10::ValueError>(copy),
                  AllOf(HasSubstr("is not the same on all ranks"), HasSubstr("'weight'")));
    columns.fill_(torch::tensor(static_cast<double>(rank)));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  layer(torch::ones({1, 6}));
                }),
                HasSubstr("'weight' of shard rank 1 was written with other tensors"));
    entry.fill_(0.5);
    columns.copy_(torch::full({6, 2}, 0.25));
    EXPECT_NO_THROW(layer(torch::ones({1, 6})));
    EXPECT_TRUE(full_value(columns).equal(torch::full({6, 2}, 0.25)));
  });
}

TEST_P(CopiedValues, ThatDifferAreNamedWhateverIsComputedWithThemBeforeTheGather) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    layer(torch::ones({1, 6}));
    layer->parameters()[0].copy_(torch::full({6, 6}, static_cast<double>(rank)));
    for (auto& entry : layer->parameters()) entry.mul_(0.5).add_(1);
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  layer(torch::ones({1, 6}));
                }),
                HasSubstr("'weight' of shard rank 1 was given other values"));
  });
}

// A model that every rank drew for itself, and that becomes the parameters' values after
// fully_shard.
TEST_P(CopiedValues, BeforeTheFirstGatherAreComparedToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    {
      const torch::NoGradGuard no_grad;
      auto bias = layer->parameters()[1];
      bias.copy_(torch::full({6}, rank));
    }
    EXPECT_THAT(message_of([&] {
                  layer(torch::ones({1, 6})).sum().backward();
                }),
                HasSubstr("'bias' of shard rank 1 was given other values"));
  });
}

// What counts are the values that the parameter had at the gather.
TEST_P(CopiedValues, OfWhichNothingIsLeftMayDiffer) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) {
      auto entry = layer->parameters()[0];
      entry.copy_(torch::full({6, 6}, rank));
      entry.fill_(0.25);
      EXPECT_NO_THROW(layer(torch::ones({1, 6})));
      entry.copy_(torch::full({6, 6}, rank));
      entry.copy_(torch::full({6, 6}, 0.75, i == 0 ? torch::kDouble : torch::kFloat));
      EXPECT_NO_THROW(layer(torch::ones({1, 6})));
    }
    EXPECT_TRUE(full_value(layer->parameters()[0]).equal(torch::full({6, 6}, 0.75)));
  });
}

TEST_P(CopiedValues, MayComeByOtherOperatorsOnARank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) {
      auto entry = layer->parameters()[0];
      if (rank == 0) {
        entry.fill_(0.25);
      } else {
        entry.copy_(torch::full({6, 6}, 0.25));
      }
      EXPECT_NO_THROW(layer(torch::ones({1, 6})));
    }
  });
}

// What is written to a summoned parameter need not be alike.
TEST_P(CopiedValues, OfASummonedParameterAreEachRanksPart) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    {
      const SummonFullParams full(layer, {.offload_to_cpu = true});
      layer->parameters()[0].fill_(static_cast<double>(rank));
    }
    EXPECT_NO_THROW(layer(torch::ones({1, 6})));
    const auto rows = torch::arange(world()).repeat_interleave(6 / world()).view({6, 1});
    EXPECT_TRUE(full_value(layer->parameters()[0]).equal(rows.expand({6, 6}).to(torch::kFloat)));
  });
}

INSTANTIATE_WORLDS(CopiedValues, 2, 3);

// Four rows over three ranks: the last holds nothing, and need not copy where a touch is
// collective.
TEST(CopiedValuesOfEmptyShards, MayBeLeftOutOverGloo) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 4, 4), mesh);
    const torch::NoGradGuard no_grad;
    for (const double value : {0.25, 0.5}) {
      for (auto& entry : model->parameters()) {
        if (DTensor(entry.detach()).to_local().numel() > 0)
          entry.copy_(torch::full(entry.sizes(), value));
      }
      EXPECT_NO_THROW(model(torch::ones({2, 4})));
      for (const auto& entry : model->parameters())
        EXPECT_TRUE(full_value(entry).equal(torch::full(entry.sizes(), value)));
    }
  });
}

TEST(CopiedValuesOfReplicas, AreComparedAtTheFirstGather) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"replicas", "shards"});
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    auto entry = layer->parameters()[0];
    entry.copy_(torch::full({6, 6}, mesh.local_rank(0)));
    EXPECT_THAT(message_of([&] {
                  layer(torch::ones({1, 6}));
                }),
                HasSubstr("'weight' of replica 1 was given other values"));
  });
}

}  // namespace
}  // namespace fsdp::testing
