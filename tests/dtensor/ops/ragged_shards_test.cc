// DTensors in parts of stated sizes and on owners: what stays where it is, and what
// moves.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::waves;
using testing::whole;

int moves_in(const std::function<void()>& body) {
  int moves = 0;
  const internal::CommListener listener([&](const internal::CommEvent&) { ++moves; });
  body();
  return moves;
}

const Placement kRagged = RaggedShard{.dim = 0, .local_units = {3, 0, 1}};

TEST(RaggedDTensors, HaveTheirUnitsOnEachRank) {
  testing::run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto rows = distribute_tensor(waves({8, 2}), mesh, {kRagged});
    EXPECT_TRUE(at::equal(rows.to_local(), rank == 0   ? waves({8, 2}).narrow(0, 0, 6)
                                           : rank == 1 ? waves({8, 2}).narrow(0, 6, 0)
                                                       : waves({8, 2}).narrow(0, 6, 2)));
    EXPECT_TRUE(at::equal(rows.full_tensor(), waves({8, 2})));
    const auto owned = distribute_tensor(waves({5, 2}), mesh, {Owned{1}});
    EXPECT_EQ(owned.to_local().size(0), rank == 1 ? 5 : 0);
    EXPECT_TRUE(at::equal(owned.full_tensor(), waves({5, 2})));
    const auto columns = distribute_tensor(waves({2, 8}), mesh, {kRagged.along(1)});
    EXPECT_EQ(columns.to_local().size(1), rank == 0 ? 6 : rank == 1 ? 0 : 2);
  });
}

// An owner sends its values once to each of the others; nothing is padded.
TEST(RaggedDTensors, ComeFromTheirOwnerByABroadcast) {
  testing::run_ranks(3, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto owned = distribute_tensor(waves({5, 2}), mesh, {Owned{2}});
    std::vector<internal::CollectiveKind> kinds;
    {
      const internal::CommListener listener(
          [&](const internal::CommEvent& event) { kinds.push_back(event.kind); });
      EXPECT_TRUE(at::equal(owned.full_tensor(), waves({5, 2})));
    }
    EXPECT_EQ(kinds, std::vector{internal::CollectiveKind::kBroadcast});
  });
}

TEST(RaggedDTensors, StayWhereTheyAreInElementwiseWork) {
  testing::run_ranks(3, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    at::Tensor a = distribute_tensor(waves({8, 2}), mesh, {kRagged});
    const at::Tensor b = distribute_tensor(waves({8, 2}, 0.3), mesh, {kRagged});
    EXPECT_EQ(moves_in([&] {
                a.mul_(b).add_(b, 2);
                EXPECT_EQ(DTensor(at::where(a > 0, a, b)).placements()[0], kRagged);
                EXPECT_EQ(DTensor(a.t()).placements()[0], kRagged.along(1));
                EXPECT_EQ(DTensor(a.view({8, 2, 1})).placements()[0], kRagged);
              }),
              0);
    const at::Tensor plain_b = waves({8, 2}, 0.3);
    EXPECT_TRUE(whole(a).equal(waves({8, 2}).mul(plain_b).add(plain_b, 2)));
    EXPECT_EQ(moves_in([&] { EXPECT_TRUE(whole(a.view({16})).equal(whole(a).view({16}))); }), 2)
        << "a view that the units do not go through is of the whole";
  });
}

TEST(RaggedDTensors, AreSteppedByLibTorchsOptimizers) {
  const auto train = [](torch::Tensor parameter, const torch::Tensor& grad) {
    parameter.requires_grad_(true);
    parameter.mutable_grad() = grad;
    torch::optim::AdamW optimizer({parameter}, torch::optim::AdamWOptions(0.1).amsgrad(true));
    optimizer.step();
    optimizer.step();
    return parameter.detach();
  };
  const auto expected = train(waves({8, 2}), waves({8, 2}, 0.3));
  for (const Placement& cut : {kRagged, Placement(Owned{1}), Placement(Owned{0}).along(1)}) {
    testing::run_ranks(3, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {3});
      const auto placed = [&](const at::Tensor& plain) {
        return distribute_tensor(plain, mesh, {cut});
      };
      torch::Tensor stepped;
      EXPECT_EQ(moves_in([&] {
                  stepped = train(placed(waves({8, 2})), placed(waves({8, 2}, 0.3)));
                }),
                0);
      EXPECT_TRUE(whole(stepped).equal(expected));
    });
  }
}

// One rank of a mesh of two dimensions has everything: an owner inside an owner.
TEST(RaggedDTensors, AreOnOneRankOfAMeshOfTwoDimensions) {
  testing::run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    for (int64_t owner = 0; owner < 4; ++owner) {
      const std::vector<Placement> placements = {Owned{owner / 2}, Owned{owner % 2}};
      at::Tensor tensor = distribute_tensor(waves({5, 3}), mesh, placements);
      EXPECT_EQ(DTensor(tensor).to_local().numel(), rank == owner ? 15 : 0);
      EXPECT_EQ(moves_in([&] { tensor.mul_(2).add_(tensor, 3); }), 0);
      EXPECT_TRUE(whole(tensor).equal(waves({5, 3}).mul(2).add(waves({5, 3}).mul(2), 3)));
      EXPECT_TRUE(whole(DTensor(tensor).redistribute({Shard{0}, Shard{1}})).equal(whole(tensor)));
      const at::Tensor rows = distribute_tensor(waves({5, 3}), mesh, {Shard{0}, Shard{0}});
      EXPECT_TRUE(whole(DTensor(rows).redistribute(placements)).equal(waves({5, 3})));
    }
  });
}

TEST(RaggedDTensors, ThatDoNotFitTheirMeshAreRefused) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    EXPECT_THAT(error_of([&] { distribute_tensor(waves({8}), mesh, {kRagged}); }),
                HasSubstr("one per coordinate of a mesh dimension of 2"));
    EXPECT_THAT(error_of([&] { distribute_tensor(waves({8}), mesh, {Owned{2}}); }),
                HasSubstr("Owned(2)"));
  });
}

}  // namespace
}  // namespace fsdp
