// ReshardAfterForward::to_world(n): between forward and backward, n neighbouring ranks
// keep one n-th of the parameters each.
#include "device_mesh/collectives/watched_rank.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"
#include "tests/fully_shard/support/row_bytes.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/warnings.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const FullyShardOptions kHalves{.reshard_after_forward = ReshardAfterForward::to_world(2)};
const FullyShardOptions kWorldOfOne{.reshard_after_forward = ReshardAfterForward::to_world(1)};

int64_t gathered_bytes(const DeviceMesh& mesh, const std::function<void()>& body) {
  return traffic_of(mesh, body).all_gather_bytes;
}

int64_t blocks_row(MeasuredDecoder& decoder, int64_t ranks) {
  return kBlocks * row_bytes(*decoder.model->blocks[0], ranks);
}

TEST(ReshardToWorld, BackwardGathersOverTheNeighboursAndReducesOverAll) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder halves(mesh, kHalves), usual(mesh);
    for (int step = 0; step < 3; ++step) {
      const auto everything = gathered_bytes(mesh, [&] { usual.forward(); });
      EXPECT_EQ(gathered_bytes(mesh, [&] { usual.backward(); }), 3 * blocks_row(usual, 4));

      EXPECT_EQ(gathered_bytes(mesh, [&] { halves.forward(); }), everything);
      Traffic backward;
      EXPECT_EQ(gathered_bytes(mesh, [&] { backward = halves.backward(); }), blocks_row(halves, 2));
      EXPECT_EQ(backward.all_gathers, kBlocks);
      EXPECT_EQ(backward.reduce_scatters, kUnits);
      usual.update();
      halves.update();
    }
  });
}

TEST(ReshardToWorld, KeepsItsPartUntilTheBackwardEnds) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.forward();
    const auto kept = counters(mesh).post_forward_bytes;
    EXPECT_EQ(kept, blocks_row(decoder, 2) + row_bytes(*decoder.model->embedding, 2));
    decoder.backward();  // which does not touch the embedding
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

TEST(ReshardToWorld, ABackwardThatIsNotTheLastKeepsThem) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.root().set_is_last_backward(false);
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(counters(mesh).post_forward_bytes, row_bytes(*decoder.model->embedding, 2));
    decoder.root().set_is_last_backward(true);
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
  });
}

TEST(ReshardToWorld, InferenceAfterInferenceGathersOverTheNeighbours) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.inference();
    const auto& model = *decoder.model;
    EXPECT_EQ(gathered_bytes(mesh, [&] { decoder.inference(); }),
              blocks_row(decoder, 2) + row_bytes(*model.embedding, 2) + row_bytes(*model.head, 2));
  });
}

TEST(ReshardToWorld, AWriteToTheShardsMakesWhatIsKeptStale) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.inference();
    torch::NoGradGuard no_grad;
    auto block = decoder.model->blocks[1];
    for (auto& entry : block->parameters()) entry.zero_();
    const auto kept = counters(mesh).post_forward_bytes;
    EXPECT_EQ(kept, (kBlocks - 1) * row_bytes(*block, 2) + row_bytes(*decoder.model->embedding, 2));
    const auto x = torch::ones({1, MeasuredDecoder::kWidth});
    EXPECT_TRUE(torch::equal(block->forward(x), x));
  });
}

TEST(ReshardToWorld, AWriteToAMemberReachesTheNextGather) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    torch::NoGradGuard no_grad;
    auto block = decoder.model->blocks[1];
    const auto x = torch::ones({1, MeasuredDecoder::kWidth});
    block->forward(x);
    block->down->weight.zero_();
    block->down->bias.fill_(2);
    decoder.model->blocks[2]->forward(x);  // block 1 is emptied
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
    EXPECT_TRUE(torch::equal(block->forward(x), x + 2));
  });
}

TEST(ReshardToWorld, ExplicitReshardKeepsNothing) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.forward();
    const auto before = counters(mesh).post_forward_bytes;
    decoder.block(0).reshard();
    EXPECT_EQ(before - counters(mesh).post_forward_bytes, row_bytes(*decoder.model->blocks[0], 2));
    decoder.backward();
  });
}

TEST(ReshardToWorld, AnExceptionInBackwardLeavesNothing) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, kHalves);
    auto x = decoder.model->embedding(make_data(5).index);
    x = decoder.model->blocks[1](decoder.model->blocks[0](x));
    x.register_hook([](const torch::Tensor&) { throw std::runtime_error("in backward"); });
    EXPECT_THROW(decoder.model->head(decoder.model->norm(x)).sum().backward(), std::exception);
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

TEST(ReshardToWorld, HasTheUnshardedGradientsOfUnevenParameters) {
  expect_parity(
      4,
      [] {
        auto layers = torch::nn::Sequential(torch::nn::Linear(16, 5), torch::nn::Linear(5, 7),
                                            torch::nn::Linear(7, 1));
        return Model{layers.ptr(), [layers](const Data& data) mutable {
                       return layers->forward(data.x.reshape({-1, 16})).pow(2).mean();
                     }};
      },
      [](torch::nn::Module& module, const DeviceMesh& mesh) {
        for (const auto& child : module.children()) fully_shard(*child, mesh, kHalves);
        fully_shard(module, mesh, kHalves);
      },
      "uneven shards in halves");
}

TEST(ReshardToWorld, MayBeSetAndTakenBackAtRunTime) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.root().set_reshard_after_forward(ReshardAfterForward::to_world(2));
    decoder.forward();
    EXPECT_GT(counters(mesh).post_forward_bytes, 0);
    EXPECT_LT(gathered_bytes(mesh, [&] { decoder.backward(); }), 3 * blocks_row(decoder, 4));
    decoder.root().set_reshard_after_forward(true);
    decoder.forward();
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
    decoder.backward();
  });
}

TEST(ReshardToWorld, OfAllRanksIsTrueAndOfOneIsFalse) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder all(mesh, {.reshard_after_forward = ReshardAfterForward::to_world(4)});
    all.forward();
    EXPECT_EQ(all.backward().all_gathers, kBlocks);
    MeasuredDecoder one(mesh, kWorldOfOne);
    one.forward();
    EXPECT_EQ(one.backward().all_gathers, 0);
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
  });
}

TEST(ReshardToWorld, OfOneWarnsThatItIsFalseAndABoolDoesNot) {
  const c10::WarningUtils::WarnAlways always;
  for (const int64_t world : {1, 2}) {
    on_ranks_of(world, [](int64_t, const DeviceMesh& mesh) {
      auto layer = make_linear(4, 4), with_false = make_linear(4, 4), with_true = make_linear(4, 4);
      Warnings warnings;
      fully_shard(with_false, mesh, {.reshard_after_forward = false});
      fully_shard(with_true, mesh, {.reshard_after_forward = true});
      EXPECT_THAT(warnings.texts(), IsEmpty());
      auto unit = fully_shard(layer, mesh, kWorldOfOne);
      unit.set_reshard_after_forward(ReshardAfterForward::to_world(1));
      const auto keeps = HasSubstr("to_world(1) keeps the parameters unsharded, as false does");
      EXPECT_THAT(warnings.texts(),
                  ElementsAre(AllOf(HasSubstr("fully_shard"), keeps),
                              AllOf(HasSubstr("set_reshard_after_forward"), keeps)));
    });
  }
}

TEST(ReshardToWorld, OfOneWarnsOncePerProcess) {
  std::atomic<size_t> count{0};
  on_ranks_of(2, [&](int64_t, const DeviceMesh& mesh) {
    Warnings warnings;
    for (int i = 0; i < 3; ++i) fully_shard(make_linear(4, 4), mesh, kWorldOfOne);
    count += warnings.texts().size();
  });
  EXPECT_LE(count.load(), 1u);  // none, where another test was told
}

// Two replicas with one rank each that shards: all ranks and one rank are the same
// number.
TEST(ReshardToWorld, OfOneOnOneRankIsFalseToo) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"});
    MeasuredDecoder usual(mesh), one(mesh, kWorldOfOne);
    usual.forward();
    EXPECT_EQ(usual.backward().all_gathers, kBlocks);
    one.forward();
    EXPECT_EQ(one.backward().all_gathers, 0);
    EXPECT_EQ(counters(mesh).post_forward_bytes, 0);
  });
}

// A process group leaves keys in the store that its ranks met at.
TEST(ReshardToWorld, UnitsShareTheProcessGroupsOfOneN) {
  // A rank that waits long says so in the store.
  internal::set_wait_patience(std::chrono::hours(1), std::chrono::milliseconds(100));
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    const auto store = default_process_group()->getStore();
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh, kHalves);
    layer(torch::ones({1, 4})).sum().backward();
    const auto keys = store->getNumKeys();
    MeasuredDecoder decoder(mesh, kHalves);
    decoder.root().set_reshard_after_forward(ReshardAfterForward::to_world(2));
    decoder.forward();
    EXPECT_GT(counters(mesh).post_forward_bytes, 0);
    decoder.backward();
    EXPECT_EQ(store->getNumKeys(), keys);
    internal::collectives_of(mesh, 0).barrier("barrier");
    mesh.side_group(0, "one more");
    EXPECT_GT(store->getNumKeys(), keys);
  });
  internal::set_wait_patience(std::chrono::milliseconds(400), std::chrono::milliseconds(100));
}

// Ranks 0, 2, 4 and 6, and beside them 1, 3, 5 and 7.
TEST(ReshardToWorld, OnASliceTheNeighboursAreNextToEachOtherInTheSlice) {
  run_ranks(8, [](int64_t rank) {
    const auto slice = init_device_mesh(torch::kCPU, {4, 2}, {"dp", "tp"})["dp"];
    const auto first = rank / 4 * 4 + rank % 2;
    EXPECT_THAT(slice.neighbours(0, 2).ranks(), ElementsAre(first, first + 2));
    MeasuredDecoder decoder(slice, kHalves);
    decoder.forward();
    EXPECT_EQ(gathered_bytes(slice, [&] { decoder.backward(); }), blocks_row(decoder, 2));
    const auto plain = build_seeded([] { return decoder_model(MeasuredDecoder::kWidth, kBlocks); });
    const auto expected = gradients_of(plain, make_data(5));  // which all ranks have
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(
          torch::allclose(full_gradient(decoder.model->parameters()[i]), expected[i], 1e-5, 1e-7))
          << "parameter " << i;
    }
  });
}

TEST(ReshardToWorld, RefusesWhatDoesNotDivideTheRanksThatShard) {
  on_ranks_of(4, [](int64_t, const DeviceMesh& mesh) {
    torch::nn::Linear layer(4, 4);
    for (const int64_t n : {-2, 0, 3, 8}) {
      EXPECT_THAT(message_of<c10::ValueError>([&] {
                    fully_shard(layer, mesh,
                                {.reshard_after_forward = ReshardAfterForward::to_world(n)});
                  }),
                  AllOf(HasSubstr("to_world(" + std::to_string(n) + ")"), HasSubstr("4 ranks"),
                        HasSubstr("[1, 2, 4]")));
      EXPECT_FALSE(is_fsdp_module(*layer));
    }
    auto module = fully_shard(layer, mesh);
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { module.set_reshard_after_forward(ReshardAfterForward::to_world(3)); }),
                HasSubstr("set_reshard_after_forward"));
  });
}

TEST(ReshardToWorld, CountsOnlyTheRanksThatShard) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    torch::nn::Linear layer(4, 4);
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  fully_shard(layer, mesh,
                              {.reshard_after_forward = ReshardAfterForward::to_world(4)});
                }),
                HasSubstr("2 ranks that shard"));
  });
}

// On a mesh of two replicas of four shards.
void expect_unsharded_gradients_in_halves(int64_t rank, const DeviceMesh& mesh) {
  const auto build = [] {
    auto layers = torch::nn::Sequential(torch::nn::Linear(16, 5), torch::nn::Linear(5, 3));
    return Model{layers.ptr(), [layers](const Data& data) mutable {
                   return layers->forward(data.x.reshape({-1, 16})).pow(2).mean();
                 }};
  };
  const auto model = build_seeded(build);
  for (const auto& child : model.module->children()) fully_shard(*child, mesh, kHalves);
  fully_shard(*model.module, mesh, kHalves);
  const auto expected = expected_gradients(build_seeded(build), 8, 1);
  const auto loss = model.loss(make_data(data_seed(1, rank)));
  EXPECT_GT(counters(mesh).post_forward_bytes, 0);
  loss.backward();
  expect_gradients(*model.module, expected, 8, "2x4 in halves");
}

TEST(ReshardToWorld, OfTwoReplicasOfFourShardsHasTheUnshardedGradients) {
  run_ranks(8, [](int64_t rank) {
    expect_unsharded_gradients_in_halves(
        rank, init_device_mesh(torch::kCPU, {2, 4}, {"replicate", "shard"}));
  });
}

// Ranks 0, 2, 4 and 6 shard, and beside them 1, 3, 5 and 7.
TEST(ReshardToWorld, OnATransposedMeshHasTheUnshardedGradients) {
  run_ranks(8, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {4, 2}, {"shard", "replicate"});
    const auto transposed = mesh[{"replicate", "shard"}];
    const auto first = rank / 4 * 4 + rank % 2;
    EXPECT_THAT(transposed.neighbours(1, 2).ranks(), ElementsAre(first, first + 2));
    expect_unsharded_gradients_in_halves(rank, transposed);
  });
}

}  // namespace
}  // namespace fsdp::testing
