// clip_grad_norm_ over meshes, plain parameters and ties: one norm on all ranks.
#include "fully_shard/clip_grad_norm.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor values(double first, std::vector<int64_t> shape = {5, 3}) {
  const auto count = c10::multiply_integers(shape);
  return torch::linspace(first, first + 2, count, torch::kDouble).view(shape);
}

// A parameter with the gradient `whole`, placed over `mesh`.
Tensor placed(const Tensor& whole, const DeviceMesh& mesh, std::vector<Placement> placements) {
  auto parameter = distribute_tensor(torch::zeros_like(whole), mesh, placements).detach();
  parameter.set_requires_grad(true);
  parameter.mutable_grad() = distribute_tensor(whole, mesh, placements);
  return parameter;
}

Tensor plain(const Tensor& gradient) {
  auto parameter = torch::zeros_like(gradient).set_requires_grad(true);
  parameter.mutable_grad() = gradient.clone();
  return parameter;
}

double norm_of(const std::vector<Tensor>& gradients, double p) {
  std::vector<Tensor> flat;
  for (const auto& gradient : gradients) flat.push_back(gradient.flatten().to(torch::kDouble));
  return torch::cat(flat).norm(p).item<double>();
}

// On a 2x2 mesh {dp, pp}, with the world as a mesh of one dimension.
void on_four_ranks(
    const std::function<void(const DeviceMesh& mesh, const DeviceMesh& world)>& body) {
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "pp"});
    body(mesh, mesh.flatten({"dp", "pp"}, "world")["world"]);
  });
}

TEST(ClipGradNorm, RefusesANormThatIsNotFiniteOnAllRanksWhereAsked) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto whole = values(1);
    whole[4][0] = kInf;  // in rank 1's part
    const auto parameter = placed(whole, mesh, {Shard{0}});
    const auto before = DTensor(parameter.grad()).to_local().clone();
    const auto text =
        message_of([&] { clip_grad_norm_({parameter}, 1.0, 2.0, /*error_if_nonfinite=*/true); });
    EXPECT_THAT(text, AllOf(HasSubstr("error_if_nonfinite"), HasSubstr("inf"))) << rank;
    EXPECT_TRUE(DTensor(parameter.grad()).to_local().equal(before));
    EXPECT_TRUE(std::isinf(clip_grad_norm_({parameter}, 1.0).item<double>()));
  });
}

TEST(ClipGradNorm, CountsEveryGradientOnceOverMeshesBesideEachOther) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh& world) {
    for (const double p : {1.0, 2.0, 3.0, kInf}) {
      const auto a = values(1), b = values(-3), c = values(0.5), d = values(2, {4});
      const std::vector<Tensor> parameters = {placed(a, mesh["dp"], {Shard{0}}),
                                              placed(b, mesh["pp"], {Shard{1}}),
                                              placed(c, world, {Shard{0}}), plain(d)};
      const auto expected = norm_of({a, b, c, d}, p);
      const auto norm = clip_grad_norm_(parameters, 0.5 * expected, p);
      EXPECT_FALSE(is_dtensor(norm));
      EXPECT_NEAR(norm.item<double>(), expected, 1e-12 * expected) << "p = " << p;
      const auto close = [](const Tensor& actual, const Tensor& whole) {
        return torch::allclose(actual, 0.5 * whole, 1e-5);
      };
      EXPECT_TRUE(close(DTensor(parameters[0].grad()).full_tensor(), a));
      EXPECT_TRUE(close(DTensor(parameters[1].grad()).full_tensor(), b));
      EXPECT_TRUE(close(DTensor(parameters[2].grad()).full_tensor(), c));
      EXPECT_TRUE(close(parameters[3].grad(), d));
    }
  });
}

TEST(ClipGradNorm, OverSlicesOnlyIsAgreedOverTheDefaultGroup) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh&) {
    const auto a = values(1), b = values(-3);
    const auto norm =
        clip_grad_norm_({placed(a, mesh["dp"], {Shard{0}}), placed(b, mesh["pp"], {Shard{0}})}, 1);
    EXPECT_NEAR(norm.item<double>(), norm_of({a, b}, 2), 1e-9);
  });
}

// As where the default group is a part of a job: its four ranks are 10 to 13 there.
TEST(ClipGradNorm, OverMeshesThatNoGroupCoversIsRefusedAndNothingIsScaled) {
  on_four_ranks([](const DeviceMesh& grid, const DeviceMesh&) {
    const auto in_job = [&](const std::string& dim) {
      auto ranks = grid[dim].ranks();
      for (auto& rank : ranks) rank += 10;
      return DeviceMesh::from_group(grid[dim].group(), torch::kCPU, ranks, dim);
    };
    const auto whole = values(1);
    const auto a = placed(whole, in_job("dp"), {Shard{0}});
    const auto b = placed(whole, in_job("pp"), {Shard{0}});
    const auto before = DTensor(a.grad()).to_local().clone();
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  clip_grad_norm_({a, b}, 0.1);
                }),
                AllOf(HasSubstr("DeviceMesh((dp=2)"), HasSubstr("DeviceMesh((pp=2)"),
                      HasSubstr("nor the default process group has all their ranks"),
                      HasSubstr("call it once per mesh")));
    EXPECT_TRUE(torch::equal(DTensor(a.grad()).to_local(), before));
    for (const auto& each : {a, b})
      EXPECT_NEAR(clip_grad_norm_({each}, 0.1).item<double>(), norm_of({whole}, 2), 1e-9);
    EXPECT_FALSE(torch::equal(DTensor(a.grad()).to_local(), before)) << "one mesh at a time";
  });
}

TEST(ClipGradNorm, AReplicatedDimensionCountsOnce) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh& world) {
    const auto a = values(1), b = values(-3), c = values(4);
    const auto norm = clip_grad_norm_(
        {placed(a, mesh, {Replicate{}, Shard{0}}), placed(b, mesh, {Replicate{}, Replicate{}}),
         placed(c, world, {Replicate{}})},
        1);
    EXPECT_NEAR(norm.item<double>(), norm_of({a, b, c}, 2), 1e-9);
  });
}

TEST(ClipGradNorm, ExpertsAreRefusedOnAllRanksAndNothingIsScaled) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh& world) {
    const auto mine = values(1 + static_cast<double>(mesh.local_rank(1)));
    const auto expert = placed(mine, mesh["dp"], {Shard{0}});
    const auto shared = placed(values(2), world, {Shard{0}});
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  clip_grad_norm_({expert, shared}, 0.1);
                }),
                AllOf(HasSubstr("no copies of each other"), HasSubstr("once per group of ranks"),
                      HasSubstr("begins at rank 1")));
    EXPECT_TRUE(torch::equal(DTensor(expert.grad()).full_tensor(), mine));
    EXPECT_NEAR(clip_grad_norm_({expert}, 0.1).item<double>(), norm_of({mine}, 2), 1e-9)
        << "alone they are one group each";
  });
}

// Collectives over dimension `dim` of the mesh, so far.
size_t announced(const DeviceMesh& mesh, int64_t dim = 0) {
  return internal::collectives_of(mesh, dim).log()->recent_operations().size();
}

TEST(ClipGradNorm, IsOneAllGather) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh& world) {
    const std::vector<Tensor> parameters = {placed(values(1), mesh["dp"], {Shard{0}}),
                                            placed(values(2), world, {Shard{0}}), plain(values(3))};
    const auto of_all = [&] {
      return announced(world) + announced(mesh["dp"]) + announced(mesh["pp"]);
    };
    const auto before = of_all();
    clip_grad_norm_(parameters, 1);
    EXPECT_EQ(of_all(), before + 1);
  });
}

// A mesh of two dimensions would be gathered over once for each of them.
TEST(ClipGradNorm, OverAMeshOfAllRanksGathersOverTheDefaultGroup) {
  on_four_ranks([](const DeviceMesh& mesh, const DeviceMesh&) {
    const auto parameter = placed(values(1), mesh, {Shard{0}, Shard{1}});
    const auto everyone = DeviceMesh::from_group(default_process_group(), torch::kCPU);
    const auto of_mesh = [&] { return announced(mesh, 0) + announced(mesh, 1); };
    const auto before = of_mesh(), before_of_everyone = announced(everyone);
    EXPECT_NEAR(clip_grad_norm_({parameter}, 1).item<double>(), norm_of({values(1)}, 2), 1e-9);
    EXPECT_EQ(of_mesh(), before);
    EXPECT_EQ(announced(everyone), before_of_everyone + 1);
  });
}

class ClipGradNormWorlds : public Worlds {};

TEST_P(ClipGradNormWorlds, PlainGradientsThatDifferGiveOneNormThatOfTheLargest) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1);
    const auto own = torch::full({3}, static_cast<double>(mesh.rank()) + 1, torch::kDouble);
    const auto largest = torch::full({3}, static_cast<double>(mesh.size()), torch::kDouble);
    for (const double p : {2.0, kInf}) {
      const auto norm = clip_grad_norm_({placed(whole, mesh, {Shard{0}}), plain(own)}, 1e9, p);
      EXPECT_NEAR(norm.item<double>(), norm_of({whole, largest}, p), 1e-9) << "p = " << p;
    }
  });
}

TEST_P(ClipGradNormWorlds, ATiedParameterCountsAndIsScaledOnce) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1), other = values(3);
    const auto tied = placed(whole, mesh, {Shard{0}}), tied_plain = plain(other);
    const auto expected = norm_of({whole, other}, 2);
    const auto norm = clip_grad_norm_({tied, tied_plain, tied, tied_plain}, 0.25 * expected);
    EXPECT_NEAR(norm.item<double>(), expected, 1e-9);
    EXPECT_TRUE(torch::allclose(DTensor(tied.grad()).full_tensor(), 0.25 * whole, 1e-5));
    EXPECT_TRUE(torch::allclose(tied_plain.grad(), 0.25 * other, 1e-5));
  });
}

TEST_P(ClipGradNormWorlds, BelowTheLimitNothingChanges) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1);
    const auto parameter = placed(whole, mesh, {Shard{0}});
    clip_grad_norm_({parameter}, 1e6);
    EXPECT_TRUE(torch::equal(DTensor(parameter.grad()).full_tensor(), whole));
  });
}

TEST_P(ClipGradNormWorlds, HalfPrecisionIsSummedInFp32AndTheResultTypeIsTheSameEverywhere) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto large = torch::full({6, 2}, 300.0).to(torch::kHalf);  // 300² is no half
    const auto fine = values(1).to(torch::kFloat);
    const auto norm =
        clip_grad_norm_({placed(large, mesh, {Shard{0}}), placed(fine, mesh, {Shard{0}})}, 1);
    EXPECT_EQ(norm.scalar_type(), torch::kFloat);
    EXPECT_NEAR(norm.item<double>(), norm_of({large, fine}, 2), 1e-3);
    const auto narrow = large.to(torch::kBFloat16);
    EXPECT_EQ(clip_grad_norm_({placed(narrow, mesh, {Shard{0}})}, 1).scalar_type(), torch::kFloat)
        << "of bf16 gradients alone, too";
  });
}

TEST_P(ClipGradNormWorlds, RanksWithoutGradientsTakePart) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1);
    const auto used = placed(whole, mesh, {Shard{0}}), unused = placed(whole, mesh, {Shard{0}});
    unused.mutable_grad().reset();
    const auto own = torch::zeros({2}, torch::kDouble).set_requires_grad(true);
    if (mesh.rank() == 0) own.mutable_grad() = torch::ones({2}, torch::kDouble);
    EXPECT_NEAR(clip_grad_norm_({own, unused, used}, 1).item<double>(),
                norm_of({whole, torch::ones({2})}, 2), 1e-9);
    EXPECT_EQ(clip_grad_norm_({unused}, 1).item<double>(), 0);
  });
}

TEST_P(ClipGradNormWorlds, ARankWithoutAnyGradientTakesPart) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1);
    const auto parameter = placed(whole, mesh, {Shard{0}});
    if (mesh.rank() != 0) parameter.mutable_grad().reset();
    const auto of_rank_zero = whole.chunk(mesh.size())[0];
    EXPECT_NEAR(clip_grad_norm_({parameter}, 1).item<double>(), norm_of({of_rank_zero}, 2), 1e-9);
  });
}

// One row is on rank 0 alone.
TEST_P(ClipGradNormWorlds, ARankWithoutAnyRowTakesPartAndScalesAlike) {
  on_ranks([](const DeviceMesh& mesh) {
    for (const double p : {2.0, kInf}) {
      const auto whole = values(1, {1, 3}), bias = values(-4, {1});
      const std::vector<Tensor> parameters = {placed(whole, mesh, {Shard{0}}),
                                              placed(bias, mesh, {Shard{0}})};
      for (const auto& parameter : parameters)
        EXPECT_EQ(DTensor(parameter.grad()).to_local().numel() > 0, mesh.rank() == 0);
      const auto expected = norm_of({whole, bias}, p);
      const auto norm = clip_grad_norm_(parameters, 0.25 * expected, p);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-9) << "p = " << p;
      const auto close = [](const Tensor& parameter, const Tensor& start) {
        return torch::allclose(DTensor(parameter.grad()).full_tensor(), 0.25 * start, 1e-5);
      };
      EXPECT_TRUE(close(parameters[0], whole)) << "p = " << p;
      EXPECT_TRUE(close(parameters[1], bias)) << "p = " << p;
    }
  });
}

TEST_P(ClipGradNormWorlds, WithoutADTensorIsLibTorchs) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto own = values(static_cast<double>(mesh.rank()));
    auto ours = plain(own), theirs = plain(own);
    const auto norm = clip_grad_norm_({ours}, 0.1);
    const auto expected = torch::nn::utils::clip_grad_norm_(std::vector<Tensor>{theirs}, 0.1);
    EXPECT_NEAR(norm.item<double>(), expected, 1e-9);
    EXPECT_TRUE(torch::allclose(ours.grad(), theirs.grad()));
    EXPECT_EQ(clip_grad_norm_({}, 1).item<double>(), 0);
  });
}

TEST_P(ClipGradNormWorlds, BadArgumentsAreNamed) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto whole = values(1);
    const auto parameter = placed(whole, mesh, {Shard{0}});
    const auto refused = [&](double max_norm, double p) {
      return message_of<c10::ValueError>([&] { clip_grad_norm_({parameter}, max_norm, p); });
    };
    EXPECT_THAT(refused(-1, 2), HasSubstr("max_norm is -1"));
    EXPECT_THAT(refused(std::nan(""), 2), HasSubstr("max_norm is nan"));
    EXPECT_THAT(refused(1, 0), HasSubstr("norm_type is 0"));
    EXPECT_THAT(refused(1, -kInf), HasSubstr("norm_type is -inf"));
    EXPECT_THAT(refused(1, std::nan("")), HasSubstr("norm_type is nan"));
    auto partial = placed(whole, mesh, {Shard{0}});
    partial.mutable_grad() = from_local(whole, mesh, {Partial{}});
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                  clip_grad_norm_({parameter, partial}, 0.1);
                }),
                HasSubstr("Partial"));
    EXPECT_TRUE(torch::equal(DTensor(parameter.grad()).full_tensor(), whole));
  });
}

INSTANTIATE_WORLDS(ClipGradNormWorlds, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
