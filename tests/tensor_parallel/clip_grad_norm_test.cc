// Clipping by the norm of gradients that are cut over "tp" and sharded over "dp", lie on
// "tp" alone, are copies, or are plain: that of one device, by one all-gather.
#include "fully_shard/clip_grad_norm.h"

#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/issued_collectives.h"
#include "tests/tensor_parallel/mesh_settings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

// A unit, and a rest that fully_shard does not see.
struct ClippedImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return rest(unit->forward(x)) * gain + offset; }
  torch::nn::Sequential unit = register_module(
      "unit",
      torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                            torch::nn::Linear(6, 7), torch::nn::GELU(), torch::nn::Linear(7, 6)));
  torch::nn::Linear rest = register_module("rest", torch::nn::Linear(6, 5));
  torch::Tensor gain = register_parameter("gain", torch::rand({5}) + 1);
  torch::Tensor offset = register_parameter("offset", torch::randn({5}));
};
TORCH_MODULE(Clipped);

const ParallelPlan kUnitPlan = {
    {"unit.0", SequenceParallel{}}, {"unit.1", ColwiseParallel{}}, {"unit.3", RowwiseParallel{}}};
const ParallelPlan kRestPlan = {{"rest", ColwiseParallel{.output_layout = Replicate{}}},
                                {"gain", ReplicateParallel{}}};

struct ClippedPair {
  Clipped plain, sharded;
  int64_t ranks;  // of the meshes on which gradients lie

  ClippedPair(const DeviceMesh& mesh, bool is_sharded, bool rest_is_parallel)
      : plain(drawn(1, [] { return Clipped(); })),
        sharded(drawn(1, [] { return Clipped(); })),
        ranks(is_sharded ? mesh.size() : mesh["tp"].size()) {
    ParallelPlan plan = kUnitPlan;
    if (rest_is_parallel) plan.insert(plan.end(), kRestPlan.begin(), kRestPlan.end());
    parallelize_module(sharded, mesh["tp"], plan);
    if (is_sharded) fully_shard(sharded->unit, mesh["dp"]);
    // The same on all ranks, so that what is not sharded has the gradient of all.
    const at::Tensor input = drawn_tensor(2, {2, 4, 6});
    for (auto model : {plain, sharded}) model->forward(input).pow(3).sum().backward();
  }

  // Clips both to `share` of the norm, which bites below 1.
  void expect_same_norm(double p, double share) {
    double joint = 0;
    for (const auto& parameter : plain->parameters()) {
      const double norm = parameter.grad().norm(p).item<double>();
      joint = std::isinf(p) ? std::max(joint, norm) : joint + std::pow(norm, p);
    }
    joint = std::isinf(p) ? joint : std::pow(joint, 1 / p);
    const double limit = joint * share;
    const at::Tensor before = plain->rest->weight.grad().clone();
    const double wanted = torch::nn::utils::clip_grad_norm_(plain->parameters(), limit, p);
    IssuedCollectives issued;
    const at::Tensor found = clip_grad_norm_(sharded->parameters(), limit, p);
    // One gather, whose rows travel with the announcement.
    EXPECT_EQ(IssuedCollectives::take(), IssuedCollectives::Counts());
    EXPECT_FALSE(is_dtensor(found));
    EXPECT_EQ(plain->rest->weight.grad().equal(before), share >= 1);  // whether the limit bites
    EXPECT_NEAR(wanted / joint, 1, 1e-12);
    EXPECT_NEAR(found.item<double>() / joint, 1, 1e-12);
    expect_same_gradients(*sharded, *plain, kClose);
  }
};

class Clipping : public OnMeshes {};

TEST_P(Clipping, IsByTheNormOfOneDeviceWhateverLiesWhere) {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    for (const bool is_sharded : {true, false}) {
      for (const bool rest_is_parallel : {true, false}) {
        SCOPED_TRACE(::testing::Message() << p << " " << is_sharded << " " << rest_is_parallel);
        on_ranks([&](const DeviceMesh& mesh) {
          ClippedPair pair(mesh, is_sharded, rest_is_parallel);
          pair.expect_same_norm(p, 0.3);
        });
      }
    }
  }
}

TEST_P(Clipping, BelowTheLimitLeavesGradientsAlone) {
  on_ranks([&](const DeviceMesh& mesh) {
    ClippedPair pair(mesh, true, true);
    pair.expect_same_norm(2, 1.5);
  });
}

TEST_P(Clipping, OfDifferentModelsOfOneClassIsAnErrorOnEveryRankThatNamesBoth) {
  on_ranks([&](const DeviceMesh& mesh) {
    ClippedPair one(mesh, false, true), other(mesh, false, true);
    const auto place = mesh["tp"].local_rank(0);
    const auto mine = (place == 1 ? other : one).sharded->parameters();
    const at::Tensor before = DTensor(mine.back().grad()).to_local().clone();
    const auto text = message_of<c10::ValueError>([&] { clip_grad_norm_(mine, 1e-3); });
    if (mesh["tp"].size() > 1) {
      EXPECT_THAT(text, ::testing::HasSubstr("the ranks differ in the parameters on mesh"));
      EXPECT_THAT(text, ::testing::HasSubstr("has parameter 'gain' (tensor-parallel by"));
      EXPECT_TRUE(DTensor(mine.back().grad()).to_local().equal(before));
    } else {
      EXPECT_EQ(text, "nothing was thrown");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Clipping,
                         ::testing::Values(MeshSetting{.dp = 1, .tp = 2},
                                           MeshSetting{.dp = 2, .tp = 1},
                                           MeshSetting{.dp = 2, .tp = 2},
                                           MeshSetting{.dp = 1, .tp = 3},
                                           MeshSetting{.dp = 3, .tp = 2}),
                         name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
