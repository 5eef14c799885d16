// Units whose parameters every rank has whole.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/mixed_precision.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class Replicated : public Worlds {};

Tensor pair_loss(Pair& model, int64_t rank) { return model(input_of(rank)).pow(2).sum(); }

std::vector<Tensor> mean_pair_gradients(int64_t world) {
  return mean_gradients(*Pair(4, 6, 3), world, at::kFloat, at::kFloat);
}

// Of the mesh that the entries of `model` are on.
Counters counters_of(const torch::nn::Module& model) {
  return counters(DTensor(model.parameters()[0]).device_mesh());
}

TEST_P(Replicated, SendsOneAllReduceAndGathersNothing) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    replicate(model, mesh);
    for (int step = 0; step < 2; ++step) {
      const auto before = counters_of(*model);
      model->zero_grad();
      pair_loss(model, rank).backward();
      const auto after = counters_of(*model);
      EXPECT_EQ(after.all_gather_bytes - before.all_gather_bytes, 0);
      EXPECT_EQ(after.reduce_scatter_bytes - before.reduce_scatter_bytes, 0);
      EXPECT_EQ(after.all_reduces - before.all_reduces, world() > 1 ? 1 : 0);
      const auto expected = mean_pair_gradients(world());
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(torch::allclose(full_gradient(model->parameters()[i]), expected[i]));
    }
  });
}

// Python's walks stop at a replicated module and hide all below it, since the two do not
// compose there.
TEST_P(Replicated, UnitsAreListedLikeOthersAndHideNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair inner(4, 6, 3);
    torch::nn::Sequential outer(inner);
    fully_shard(inner->first, mesh);
    const auto replicated = replicate(inner, mesh);
    const auto root = fully_shard(outer, mesh);
    const auto below = get_fsdp_module(*inner->first);
    EXPECT_EQ(fsdp_modules(*outer), (std::vector<FSDPModule>{root, replicated, below}));
    EXPECT_EQ(fsdp_modules(*inner), (std::vector<FSDPModule>{replicated, below}));
    EXPECT_EQ(fsdp_modules(*inner->first), std::vector<FSDPModule>{below});
    EXPECT_EQ(fsdp_modules(*outer, /*root_only=*/true), std::vector<FSDPModule>{root});
    EXPECT_TRUE(fsdp_modules(*inner->second).empty());
    EXPECT_FALSE(is_fsdp_module(*inner->second)) << "asking makes no unit";
  });
}

TEST_P(Replicated, EntriesAreWholeOnEveryRank) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    replicate(model, mesh);
    for (const auto& entry : model->parameters())
      EXPECT_EQ(DTensor(entry).to_local().sizes(), entry.sizes());
  });
}

TEST_P(Replicated, UnitsStandBesideShardedOnes) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    replicate(model->second, mesh);
    fully_shard(model, mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto gathers = counters(mesh).all_gathers;
    pair_loss(model, rank).backward();
    EXPECT_EQ(counters_of(*model->second).all_gather_bytes, 0);
    EXPECT_EQ(counters(mesh).all_gathers - gathers, world() > 1 ? 1 : 0) << "of the first layer";
    const auto expected = mean_pair_gradients(world());
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::allclose(full_gradient(model->parameters()[i]), expected[i]));
    clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
  });
}

TEST_P(Replicated, WithoutSynchronisationNothingIsSent) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    auto unit = replicate(model, mesh);
    {
      NoSyncGuard guard(unit);
      pair_loss(model, rank).backward();
      EXPECT_EQ(counters_of(*model).all_reduces, 0);
    }
    pair_loss(model, rank).backward();
    EXPECT_EQ(counters_of(*model).all_reduces, mesh.size() > 1 ? 1 : 0);
  });
}

INSTANTIATE_WORLDS(Replicated, 1, 2, 3);

TEST(ReplicatedOnMeshes, NeedsOneDimension) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {1, 2});
    Pair model(4, 6, 3);
    expect_error<c10::ValueError>([&] { replicate(model, mesh); }, HasSubstr("one dimension"));
    EXPECT_FALSE(is_fsdp_module(*model));
  });
}

TEST(HybridMesh, SharesShardsWithinNodes) {
  run_ranks(6, [](int64_t rank) {
    const auto mesh = init_hybrid_mesh(torch::kCPU, 2);
    EXPECT_EQ(mesh.shape(), (std::vector<int64_t>{3, 2}));
    const auto first = rank / 2 * 2, place = rank % 2;
    EXPECT_EQ(mesh["shard"].ranks(), (std::vector<int64_t>{first, first + 1}));
    EXPECT_EQ(mesh["replicate"].ranks(), (std::vector<int64_t>{place, place + 2, place + 4}));
    for (const int64_t bad : {0, -1, 4, 12})
      expect_error<c10::ValueError>([&] { init_hybrid_mesh(torch::kCPU, bad); },
                                    HasSubstr("ranks_per_node is " + std::to_string(bad)));
  });
}

}  // namespace
}  // namespace fsdp::testing
