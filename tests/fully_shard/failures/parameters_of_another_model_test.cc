// Calls that take parameters, by ranks that give those of different models of one class:
// every shape is equal, and one number would be made of two models.
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/grad_scaler.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

void give_gradients(Pair& model, int64_t rank) {
  model(torch::full({2, 4}, static_cast<double>(rank + 1))).pow(2).sum().backward();
}

class TwinModels : public Worlds {};

TEST_P(TwinModels, ClippedByDifferentRanksAreAnErrorOnEveryRankThatNamesBoth) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto one = sharded(Pair(), mesh), other = sharded(Pair(), mesh);
    give_gradients(one, rank);
    give_gradients(other, rank);
    const auto mine = (rank == 1 ? other : one)->parameters();
    const auto before = DTensor(mine[0].grad()).to_local().clone();
    EXPECT_THAT(message_of<c10::ValueError>([&] { clip_grad_norm_(mine, 1e-3); }),
                AllOf(HasSubstr("rank 0 has parameter 'first.weight' (number 0 of unit 'first', "
                                "which is number 0 of"),
                      HasSubstr("rank 1 has parameter 'first.weight' (number 0 of unit 'first', "
                                "which is number 2 of"),
                      HasSubstr("(rank " + std::to_string(rank) + ")")));
    EXPECT_TRUE(DTensor(mine[0].grad()).to_local().equal(before));
    EXPECT_GT(clip_grad_norm_(one->parameters(), 1e-3).item<double>(), 0) << "the group goes on";
  });
}

TEST_P(TwinModels, ClippedTogetherInAnotherOrderAreNamed) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto one = sharded(Pair(), mesh), other = sharded(Pair(), mesh);
    give_gradients(one, rank);
    give_gradients(other, rank);
    auto both = one->parameters();
    for (const auto& parameter : other->parameters()) both.push_back(parameter);
    if (rank == 0) std::swap(both[1], both[5]);  // two biases of one shape
    EXPECT_THAT(message_of<c10::ValueError>([&] { clip_grad_norm_(both, 1); }),
                AllOf(HasSubstr("rank 0 has parameter 'first.bias'"),
                      HasSubstr("rank 1 has parameter 'first.bias'")));
  });
}

TEST_P(TwinModels, UnscaledByDifferentRanksAreAnErrorOnEveryRankThatNamesBoth) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto one = sharded(Pair(), mesh), other = sharded(Pair(), mesh);
    give_gradients(one, rank);
    give_gradients(other, rank);
    torch::optim::SGD of_one(one->parameters(), 0.1), of_other(other->parameters(), 0.1);
    GradScaler scaler(mesh);
    auto& mine = rank == 1 ? of_other : of_one;
    EXPECT_THAT(message_of<c10::ValueError>([&] { scaler.step(mine); }),
                AllOf(HasSubstr("rank 0 has parameter 'first.weight' (number 0 of unit "
                                "'first', which is number 0 of"),
                      HasSubstr("rank 1 has parameter 'first.weight' (number 0 of unit "
                                "'first', which is number 2 of")));
    const auto before = full_value(one->parameters()[0]).clone();
    EXPECT_FALSE(scaler.step(mine)) << "no gradient is divided twice";
    EXPECT_TRUE(full_value(one->parameters()[0]).equal(before));
    scaler.update();
    EXPECT_TRUE(scaler.step(of_one) && scaler.step(of_other)) << "the group goes on";
  });
}

TEST_P(TwinModels, UnscaledByOtherScalesAreAnErrorOnEveryRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    give_gradients(model, rank);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh, {.init_scale = rank == 1 ? 8.0 : 4.0});
    EXPECT_THAT(message_of<c10::ValueError>([&] { scaler.unscale_(optimizer); }),
                HasSubstr("the scale: rank 0 has 4 where rank 1 has 8"));
  });
}

INSTANTIATE_WORLDS(TwinModels, 2, 3);

TEST(TwinModelsOfReplicas, ClippedByDifferentReplicasAreAnErrorOnEveryRank) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto one = sharded(Pair(), mesh), other = sharded(Pair(), mesh);
    give_gradients(one, rank);
    give_gradients(other, rank);
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { clip_grad_norm_((rank < 2 ? one : other)->parameters(), 1); }),
                AllOf(HasSubstr("rank 0 has parameter"), HasSubstr("rank 2 has parameter")));
  });
}

// Each stage has a model and a mesh of its own, and may have made more models before.
TEST(StagesOfAPipeline, ClipTheirOwnModels) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"stage", "shard"});
    const auto stage = mesh.local_rank(0);
    std::vector<Pair> models;
    for (int64_t i = 0; i <= stage; ++i) models.push_back(sharded(Pair(), mesh["shard"]));
    give_gradients(models.back(), rank);
    EXPECT_GT(clip_grad_norm_(models.back()->parameters(), 1).item<double>(), 0);
  });
}

// One scaler for all stages, as a loss passes through all of them.
TEST(StagesOfAPipeline, ScaleTheirOwnModelsTogether) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"stage", "shard"});
    std::vector<Pair> models;
    for (int64_t i = 0; i <= mesh.local_rank(0); ++i)
      models.push_back(sharded(Pair(), mesh["shard"]));
    give_gradients(models.back(), rank);
    torch::optim::SGD optimizer(models.back()->parameters(), 0.1);
    GradScaler scaler(mesh);
    EXPECT_TRUE(scaler.step(optimizer));
  });
}

// Copies of a model on parts of the mesh of another one.
TEST(StagesOfAPipeline, MayHaveMadeOtherUnitsBeforeTheCopiesThatAreClippedOverAllRanks) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copy", "shard"});
    const auto world = mesh.flatten({"copy", "shard"}, "world")["world"];
    std::vector<Pair> own;
    for (int64_t i = 0; i <= mesh.local_rank(0); ++i) own.push_back(sharded(Pair(), mesh["shard"]));
    auto shared = sharded(Pair(), world);
    give_gradients(own.back(), mesh.local_rank(1));
    give_gradients(shared, rank);
    auto parameters = own.back()->parameters();
    for (const auto& parameter : shared->parameters()) parameters.push_back(parameter);
    EXPECT_GT(clip_grad_norm_(parameters, 1).item<double>(), 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
