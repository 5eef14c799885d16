// Cuts in blocks and of atoms: heads, flattened batches, packed matrices. Nothing moves
// where Megatron moves nothing.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

using testing::error_of;
using testing::expect_as_plain;
using ::testing::HasSubstr;
using testing::on_worlds;
using testing::Problem;
using testing::waves;
using testing::whole;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

int count_moves(const std::function<void()>& body) {
  int moves = 0;
  const internal::CommListener listener([&](const internal::CommEvent&) { ++moves; });
  body();
  return moves;
}

// One rank alone has everything however it is cut.
void expect_placed(const at::Tensor& tensor, const Placement& placement) {
  if (DTensor(tensor).device_mesh().size() == 1) return;
  EXPECT_EQ(DTensor(tensor).placements(), Placements{placement});
}

TEST(InterleavedCuts, EachRankHasItsAtomsOfEveryBlock) {
  testing::run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor row = at::arange(12);
    const auto part_of = [&](const Shard& cut) {
      return distribute_tensor(row, mesh, {cut}).to_local();
    };
    const at::Tensor blocks = part_of({.dim = 0, .outer = 2});
    EXPECT_TRUE(blocks.equal(rank == 0 ? at::tensor({0, 1, 2, 6, 7, 8}, at::kLong)
                                       : at::tensor({3, 4, 5, 9, 10, 11}, at::kLong)));
    const at::Tensor heads = part_of({.dim = 0, .unit = 4});
    EXPECT_TRUE(heads.equal(rank == 0 ? at::arange(8) : at::arange(8, 12)));
    const at::Tensor both = part_of({.dim = 0, .outer = 2, .unit = 2});
    EXPECT_TRUE(both.equal(rank == 0 ? at::tensor({0, 1, 2, 3, 6, 7, 8, 9}, at::kLong)
                                     : at::tensor({4, 5, 10, 11}, at::kLong)));
  });
}

TEST(InterleavedCuts, AreWrittenSimplest) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto cut = [&](const Shard& shard) {
      return distribute_tensor(at::arange(12), mesh, {shard}).placements();
    };
    EXPECT_EQ(cut({.dim = 0, .unit = 3}), Placements{Shard{0}});
    EXPECT_EQ(cut({.dim = -1, .unit = 4}), (Placements{Shard{.dim = 0, .unit = 4}}));
    EXPECT_EQ(to_string(Placement(Shard{.dim = 1, .outer = 3, .unit = 4})),
              "Shard(1, outer=3, unit=4)");
  });
}

TEST(InterleavedCuts, ThatDoNotFitAreRefused) {
  testing::run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const auto error = [&](const Placements& placements) {
      return error_of([&] { distribute_tensor(at::arange(12), mesh, placements); });
    };
    EXPECT_THAT(error({Shard{.dim = 0, .unit = 5}, Replicate{}}),
                HasSubstr("outer * unit must divide dimension 0 of 12 elements"));
    EXPECT_THAT(error({Shard{.dim = 0, .outer = 0}, Replicate{}}),
                HasSubstr("outer and unit are at least 1, got 0 and 1"));
    EXPECT_THAT(error({Shard{0}, Shard{.dim = 0, .outer = 2}}),
                HasSubstr("lies inside another cut of dimension 0"));
  });
}

// [batch, sequence, heads * width] -> heads and back, seven heads on two or three ranks.
TEST(InterleavedCuts, UnevenHeadsAreSplitAndMergedWhereTheyAre) {
  on_worlds([](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(waves({2, 3, 28}), mesh, {Shard{.dim = 2, .unit = 4}});
    x.requires_grad_();
    EXPECT_EQ(count_moves([&] {
                const at::Tensor heads = x.view({2, 3, 7, 4}).transpose(1, 2);
                expect_placed(heads, Shard{1});
                const at::Tensor merged = heads.mul(2).transpose(1, 2).reshape({2, 3, 28});
                merged.square().sum().backward();
              }),
              0);
    EXPECT_TRUE(whole(x.grad()).allclose(waves({2, 3, 28}).mul(8)));
  });
}

// torch::nn::functional::linear of a tensor that is cut along the sequence.
TEST(InterleavedCuts, SequencesStayCutThroughLinear) {
  on_worlds([](const DeviceMesh& mesh) {
    at::Tensor x = distribute_tensor(waves({2, 5, 4}), mesh, {Shard{1}}).requires_grad_();
    at::Tensor weight = distribute_tensor(waves({3, 4}, 0.3), mesh, {Replicate{}}).requires_grad_();
    at::Tensor y;
    EXPECT_EQ(count_moves([&] { y = at::matmul(x, weight.t()); }), 0);
    expect_placed(y, Shard{1});
    y.square().sum().backward();
    at::Tensor plain_x = waves({2, 5, 4}).requires_grad_();
    at::Tensor plain_weight = waves({3, 4}, 0.3).requires_grad_();
    at::matmul(plain_x, plain_weight.t()).square().sum().backward();
    EXPECT_TRUE(whole(x.grad()).allclose(plain_x.grad()));
    EXPECT_TRUE(whole(weight.grad()).allclose(plain_weight.grad()));
  });
}

// What torch::nn::MultiheadAttention does: one matrix for query, key and value.
TEST(InterleavedCuts, PackedMatricesComeApartWhereTheyAre) {
  on_worlds([](const DeviceMesh& mesh) {
    at::Tensor packed =
        distribute_tensor(waves({5, 30}), mesh, {Shard{.dim = 1, .outer = 3, .unit = 2}});
    packed.requires_grad_();
    EXPECT_EQ(count_moves([&] {
                const auto parts = packed.chunk(3, -1);
                EXPECT_EQ(DTensor(parts[0]).placements(), DTensor(parts[2]).placements());
                parts[0].mul(parts[1]).add(parts[2]).square().sum().backward();
              }),
              0);
    at::Tensor plain = waves({5, 30}).requires_grad_();
    const auto parts = plain.chunk(3, -1);
    parts[0].mul(parts[1]).add(parts[2]).square().sum().backward();
    EXPECT_TRUE(whole(packed.grad()).allclose(plain.grad()));
    at::Tensor sliced = packed.detach().slice(1, 10, 20);
    EXPECT_EQ(count_moves([&] { sliced.zero_(); }), 0);
    EXPECT_EQ(whole(packed.detach()).slice(1, 10, 20).count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(whole(packed.detach()).count_nonzero().item<int64_t>(), 5 * 20 - 1);
  });
}

TEST(InterleavedCuts, SlicesAndJoinsAreThoseOfPlainTensors) {
  expect_as_plain([] {
    return Problem{{waves({4, 12}), waves({4, 6}, 0.3)}, [](const Tensors& t) {
                     const auto thirds = t[0].split(4, 1);
                     const at::Tensor last = t[0].slice(1, 6, 12).add(t[1]);
                     return at::cat({thirds[2], last, thirds[0], t[1].mul(last)}, 1);
                   }};
  });
}

TEST(InterleavedCuts, ViewsAreThoseOfPlainTensors) {
  expect_as_plain(
      [] {
        return Problem{{waves({4, 6, 2})}, [](const Tensors& t) {
                         return t[0].view({2, 2, 12}).add(1).view({8, 6}).mul(2).view({4, 3, 4});
                       }};
      },
      60);
}

}  // namespace
}  // namespace fsdp
