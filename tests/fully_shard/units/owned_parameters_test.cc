// Parameters in whole blocks of rows, in parts of stated sizes and on owners train as the
// unsharded model, whatever else the unit does.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

// Matrices of 6 x 8, 12 x 6 and 3 x 12, and their biases.
struct MixedNetImpl : torch::nn::Module {
  MixedNetImpl()
      : first(register_module("first", torch::nn::Linear(8, 6))),
        second(register_module("second", torch::nn::Linear(6, 12))),
        last(register_module("last", torch::nn::Linear(12, 3))) {
    to(torch::kDouble);
    set_start_values(*this);
  }
  Tensor forward(const Tensor& x) { return last(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(MixedNet);

Tensor mixed_loss(MixedNet& net, int64_t rank, int64_t step) {
  const auto numbers = torch::arange(40, torch::kDouble).mul(static_cast<double>(1 + rank));
  return net(torch::sin(numbers + static_cast<double>(step)).view({5, 8})).pow(2).sum();
}

using Placements = std::map<std::string, Placement>;

// Each kind, for `ranks` that shard.
std::vector<Placements> kinds_of_placements(int64_t ranks) {
  std::vector<int64_t> odd(static_cast<size_t>(ranks), 1);
  odd.back() = ranks == 1 ? 1 : 0;
  odd.front() += 12 - (odd.back() + ranks - 1);  // 12 in all
  const Placement ragged = RaggedShard{.dim = 0, .local_units = odd};
  return {{{"weight", Shard{.dim = 0, .unit = 3}}, {"bias", Shard{.dim = 0, .unit = 3}}},
          {{"second.weight", ragged}, {"last.weight", ragged.along(1)}, {"first.bias", Shard{0}}},
          {{"weight", Owned{}}},
          {{"weight", Owned{}}, {"bias", Owned{}}},
          {{"first.weight", Owned{ranks - 1}},
           {"second.weight", ragged},
           {"last.weight", Shard{1}},
           {"second.bias", Shard{.dim = 0, .unit = 4}}},
          {{"first.weight", Owned{0}}, {"last.weight", Placement(Owned{ranks - 1}).along(1)}}};
}

// `module`: the unit's, of whose path names lack the beginning.
FullyShardOptions placed_so(const Placements& placements, FullyShardOptions options = {},
                            const std::string& module = "") {
  options.shard_placement_fn = [placements, module](const std::string& name,
                                                    const Tensor&) -> std::optional<Placement> {
    for (const auto& [end, placement] : placements)
      if ((module + name).ends_with(end)) return placement;
    return std::nullopt;
  };
  return options;
}

MixedNet sharded_net(const DeviceMesh& mesh, const Placements& placements,
                     const FullyShardOptions& options = {}) {
  MixedNet net;
  fully_shard(net->second, mesh, placed_so(placements, options, "second."));
  fully_shard(net, mesh, placed_so(placements, options));
  return net;
}

void expect_mixed_same(const Tensor& actual, const Tensor& expected, int64_t ranks,
                       const std::string& what) {
  const double tolerance = ranks <= 2 ? 0 : 1e-12;
  ASSERT_TRUE(actual.defined()) << what;
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance))
      << what << " differs by " << (actual - expected).abs().max();
}

// Two micro-batches in the second step, the first without synchronisation.
void expect_trains_as_plain(const DeviceMesh& mesh, const Placements& placements,
                            const std::string& what, const FullyShardOptions& options = {}) {
  MixedNet plain, net = sharded_net(mesh, placements, options);
  const auto adamw = torch::optim::AdamWOptions(0.01).eps(1e-3);  // what is rounded stays small
  torch::optim::AdamW reference(plain->parameters(), adamw), optimizer(net->parameters(), adamw);
  for (int64_t step = 0; step < 4; ++step) {
    reference.zero_grad();
    optimizer.zero_grad();
    const std::vector<int64_t> micro_batches =
        step == 1 ? std::vector<int64_t>{10, 11} : std::vector<int64_t>{step};
    for (int64_t rank = 0; rank < mesh.size(); ++rank) {
      Tensor loss;  // of a rank, whose gradients are added up first
      for (const int64_t data : micro_batches) {
        const auto each = mixed_loss(plain, rank, data) / static_cast<double>(mesh.size());
        loss = loss.defined() ? loss + each : each;
      }
      loss.backward();
    }
    for (const int64_t data : micro_batches) {
      get_fsdp_module(*net).set_requires_gradient_sync(data == micro_batches.back());
      mixed_loss(net, mesh.rank(), data).backward();
    }
    reference.step();
    optimizer.step();
    const auto entries = net->named_parameters();
    for (size_t i = 0; i < entries.size(); ++i)
      expect_mixed_same(full_value(entries[i].value().detach()), plain->parameters()[i].detach(),
                        mesh.size(), what + ", " + entries[i].key());
  }
}

class OwnedParameters : public Worlds {};

TEST_P(OwnedParameters, TrainAsTheUnshardedModelOverEveryTransport) {
  for (const char* setting : {"on", "copy", "off"}) {
    const WithEnvironment memory("FSDP_PEER_MEMORY", setting);
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      for (const auto& placements : kinds_of_placements(world()))
        expect_trains_as_plain(mesh, placements, setting);
    });
  }
}

TEST_P(OwnedParameters, TrainAsTheUnshardedModelHoweverTheyAreResharded) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const auto& placements : kinds_of_placements(world())) {
      for (const bool reshards : {true, false})
        expect_trains_as_plain(mesh, placements, reshards ? "resharded" : "kept",
                               {.reshard_after_forward = reshards});
      if (world() == 4)
        expect_trains_as_plain(mesh, placements, "to two",
                               {.reshard_after_forward = ReshardAfterForward::to_world(2)});
    }
  });
}

// Over Gloo, between hosts: from the second gather on, when all ranks are known to cut
// alike.
TEST(OwnedRows, TravelAsLongAsTheyAre) {
  const WithEnvironment memory("FSDP_PEER_MEMORY", "off");
  constexpr int64_t kWidth = 256, kBytes = kWidth * kWidth * 4;
  on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear layer(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
    set_start_values(*layer);
    const auto whole = layer->weight.detach().clone();
    const FullyShardOptions options = placed_so({{"weight", Owned{1}}});
    auto unit = fully_shard(layer, mesh, options);
    unit.unshard();
    unit.reshard();
    auto handle = unit.unshard_async();
    EXPECT_EQ(counters(mesh).staging_bytes, rank == 1 ? 0 : kBytes);
    handle.wait();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(layer->weight, whole));
  });
}

TEST(OwnedRows, OfGradientsAreAddedUpOnTheirOwner) {
  const WithEnvironment memory("FSDP_PEER_MEMORY", "off");
  constexpr int64_t kWidth = 128;
  on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear layer(kWidth, kWidth);
    set_start_values(*layer);
    fully_shard(layer, mesh, placed_so({{"weight", Owned{2}}}));
    for (int step = 0; step < 2; ++step) {
      layer->zero_grad();
      layer(torch::full({1, kWidth}, static_cast<double>(rank + 1))).sum().backward();
      EXPECT_TRUE(
          torch::equal(full_gradient(layer->parameters()[0]), torch::full({kWidth, kWidth}, 2.0)));
      EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[1]), torch::ones({kWidth})));
    }
  });
}

// A double has another one's precision here, and so has the sum.
TEST_P(OwnedParameters, TrainInMixedPrecisionAndOffloaded) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const auto& placements : kinds_of_placements(world())) {
      const FullyShardOptions mixed{
          .mp_policy = {.param_dtype = torch::kFloat, .reduce_dtype = torch::kDouble}};
      std::vector<std::vector<Tensor>> results;
      for (const auto& placed : {Placements(), placements}) {
        auto net = sharded_net(mesh, placed, mixed);
        torch::optim::SGD optimizer(net->parameters(), 0.01);
        mixed_loss(net, mesh.rank(), 1).backward();
        optimizer.step();
        auto& values = results.emplace_back();
        for (const auto& parameter : net->parameters())
          values.push_back(full_value(parameter.detach()));
      }
      for (size_t i = 0; i < results[0].size(); ++i)
        expect_mixed_same(results[1][i], results[0][i], world(), "mixed precision");
      FullyShardOptions offloaded;
      offloaded.offload_policy.offload_to_cpu = true;
      expect_trains_as_plain(mesh, placements, "offloaded", offloaded);
    }
  });
}

TEST_P(OwnedParameters, AreClippedByTheNormOfAll) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    MixedNet plain;
    for (int64_t rank = 0; rank < world(); ++rank)
      (mixed_loss(plain, rank, 0) / static_cast<double>(world())).backward();
    const auto norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
    for (const auto& placements : kinds_of_placements(world())) {
      auto net = sharded_net(mesh, placements);
      mixed_loss(net, mesh.rank(), 0).backward();
      EXPECT_NEAR(clip_grad_norm_(net->parameters(), 0.1).item<double>(), norm, 1e-12 * norm);
      for (size_t i = 0; i < plain->parameters().size(); ++i)
        EXPECT_TRUE(torch::allclose(full_value(net->parameters()[i].grad()),
                                    plain->parameters()[i].grad(), 1e-12, 1e-12));
    }
  });
}

TEST_P(OwnedParameters, OfADeferredModelHaveItsValues) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const auto& placements : kinds_of_placements(world())) {
      auto net = deferred_init([] { return MixedNet(); });
      fully_shard(net->second, mesh, placed_so(placements, {}, "second."));
      fully_shard(net, mesh, placed_so(placements));
      materialize(*net);
      const MixedNet plain;
      for (size_t i = 0; i < plain->parameters().size(); ++i)
        EXPECT_TRUE(torch::equal(full_value(net->parameters()[i].detach()),
                                 plain->parameters()[i].detach()));
    }
  });
}

INSTANTIATE_WORLDS(OwnedParameters, 1, 2, 3, 4);

TEST(OwnedParameters, TrainAsTheUnshardedModelInHybridSharding) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    for (const auto& placements : kinds_of_placements(2))
      expect_trains_as_plain(mesh, placements, "hybrid");
  });
}

TEST(OwnedParameters, AreWhereThePlacementSays) {
  on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    const auto net =
        sharded_net(mesh, {{"first.weight", Owned{1}},
                           {"second.bias", RaggedShard{.dim = 0, .local_units = {3, 0, 1}}},
                           {"last.weight", Shard{.dim = 1, .unit = 6}}});
    const auto rows = [](const Tensor& entry, int64_t dim) {
      return DTensor(entry).to_local().size(dim);
    };
    const auto entries = net->named_parameters();
    EXPECT_EQ(DTensor(entries["first.weight"]).placements()[0], Placement(Owned{1}));
    EXPECT_EQ(rows(entries["first.weight"], 0), rank == 1 ? 6 : 0);
    EXPECT_EQ(rows(entries["second.bias"], 0), rank == 0 ? 9 : rank == 1 ? 0 : 3);
    EXPECT_EQ(rows(entries["last.weight"], 1), rank == 2 ? 0 : 6);
    EXPECT_TRUE(torch::equal(full_value(entries["first.weight"].detach()),
                             MixedNet()->first->weight.detach()));
  });
}

// Four matrices of one size in two units, on two ranks: two each, and the units differ.
TEST(OwnedParameters, AreDealtOutEvenlyOverUnits) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto layer = [] { return torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)); };
    torch::nn::Sequential model(layer(), layer(), layer(), layer());
    for (size_t i = 0; i < 3; ++i) fully_shard(*model[i], mesh, placed_so({{"weight", Owned{}}}));
    fully_shard(model, mesh, placed_so({{"weight", Owned{}}}));
    std::vector<Placement> owners;
    for (const auto& parameter : model->parameters())
      owners.push_back(DTensor(parameter).placements()[0]);
    EXPECT_EQ(owners, (std::vector<Placement>{Owned{0}, Owned{1}, Owned{0}, Owned{1}}));
  });
}

// A row is as long as what the rank with the most has, and shards take no more memory.
TEST(OwnedParameters, TakeARowOfWhatTheFullestRankHas) {
  const WithEnvironment memory("FSDP_PEER_MEMORY", "off");
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto bytes_of = [&](const Placements& placements) {
      MixedNet net;
      fully_shard(net, mesh, placed_so(placements));
      return get_fsdp_module(*net).counters().sharded_bytes;
    };
    // Of 72, 48 and 36 elements the fullest rank has 84, and so it has of even parts,
    // whose largest are 36, 24 and 24.
    EXPECT_EQ(bytes_of({{"weight", Owned{}}}), bytes_of({}));
  });
}

TEST(OwnedParameters, ThatDoNotFitAreRefusedByName) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto error = [&](const Placement& placement) {
      MixedNet net;
      const auto text = message_of([&] {
        fully_shard(net, mesh, placed_so({{"second.weight", placement}}));
      });
      EXPECT_FALSE(is_fsdp_module(*net));
      for (const auto& parameter : net->parameters()) EXPECT_FALSE(is_dtensor(parameter));
      return text;
    };
    const auto is_named =
        AllOf(HasSubstr("'second.weight'"), HasSubstr("rank " + std::to_string(rank)));
    EXPECT_THAT(error(Owned{2}), AllOf(is_named, HasSubstr("Owned(2)")));
    EXPECT_THAT(error(RaggedShard{0, {1, 1, 1}}), AllOf(is_named, HasSubstr("the 2 ranks")));
    EXPECT_THAT(error(RaggedShard{0, {4, 1}}),
                AllOf(is_named, HasSubstr("do not divide the 12 elements of dimension 0")));
    EXPECT_THAT(error(RaggedShard{0, {-1, 2}}), is_named);
    EXPECT_THAT(error(Shard{.dim = 0, .unit = 5}), AllOf(is_named, HasSubstr("do not divide")));
    EXPECT_THAT(error(Shard{.dim = 0, .outer = 2}), AllOf(is_named, HasSubstr("without outer")));
    EXPECT_THAT(error(Replicate{}), AllOf(is_named, HasSubstr("expected a Shard, RaggedShard")));
    EXPECT_THAT(error(Partial{}), AllOf(is_named, HasSubstr("Partial(sum)")));
  });
}

// Ranks that place otherwise are told so when they gather.
TEST(OwnedParameters, OfOtherPlacementsOnAnotherRankAreAnError) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    MixedNet net;
    fully_shard(net, mesh, placed_so({{"first.weight", Owned{rank}}}));
    EXPECT_THAT(message_of([&] { mixed_loss(net, 0, 0); }), HasSubstr("first.weight"));
  });
}

}  // namespace
}  // namespace fsdp::testing
