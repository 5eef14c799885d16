// A unit that is summoned is not summoned again: on no rank, whatever each of them shows
// in its registry, and nothing is lost or left behind.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NestedSummons : public Worlds {};

struct HowSummoned {
  const char* name;
  SummonOptions options;
  MixedPrecisionPolicy precision;
};

std::vector<HowSummoned> every_way() {
  const MixedPrecisionPolicy cast{.param_dtype = torch::kDouble};
  return {{"members", {}, {}},
          {"members, dropped", {.writeback = false}, {}},
          {"on rank 0", {.writeback = false, .rank0_only = true}, {}},
          {"offloaded", {.offload_to_cpu = true}, {}},
          {"offloaded, on rank 0",
           {.writeback = false, .rank0_only = true, .offload_to_cpu = true},
           {}},
          {"cast", {}, cast},
          {"cast, dropped", {.writeback = false}, cast},
          {"cast, on rank 0", {.writeback = false, .rank0_only = true}, cast}};
}

Decoder sharded_decoder(const DeviceMesh& mesh, const MixedPrecisionPolicy& precision) {
  Decoder model(5, 2);
  set_start_values(*model);
  for (auto& block : model->blocks) fully_shard(block, mesh, {.mp_policy = precision});
  fully_shard(model, mesh, {.mp_policy = precision});
  return model;
}

std::vector<torch::Tensor> values_of(const Decoder& model) {
  std::vector<torch::Tensor> values;
  for (const auto& parameter : model->parameters()) values.push_back(full_value(parameter));
  return values;
}

TEST_P(NestedSummons, AreRefusedOnEveryRankInEveryWay) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    for (const auto& [name, options, precision] : every_way()) {
      SCOPED_TRACE(name);
      auto model = sharded_decoder(mesh, precision);
      const auto before = values_of(model);
      {
        const SummonFullParams outer(model, options);
        const auto of_root = AllOf(HasSubstr("'(root)'"), HasSubstr("summoned already"));
        EXPECT_THAT(message_of<c10::ValueError>([&] { SummonFullParams again(model); }), of_root);
        EXPECT_THAT(message_of<c10::ValueError>([&] {
                      SummonFullParams again(get_fsdp_module(*model), {.recurse = false});
                    }),
                    of_root);
        EXPECT_THAT(message_of<c10::ValueError>([&] {
                      SummonFullParams inner(model->blocks[1], {.offload_to_cpu = true});
                    }),
                    HasSubstr("'block1' is summoned already"));
        bool called = false;
        EXPECT_THAT(message_of<c10::ValueError>([&] {
                      apply_unsharded(*model, [&](torch::nn::Module&) { called = true; });
                    }),
                    AllOf(HasSubstr("apply_unsharded"), HasSubstr("summoned already")));
        EXPECT_FALSE(called);
      }
      const auto after = values_of(model);
      for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
      const SummonFullParams once_more(model, options);
    }
  });
}

TEST_P(NestedSummons, OfAnEnclosingModelAreRefusedBeforeAnythingIsGathered) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_decoder(mesh, {});
    const SummonFullParams inner(model->blocks[0], {.offload_to_cpu = true});
    const auto gathers = counters(mesh).all_gathers;
    EXPECT_THAT(message_of<c10::ValueError>([&] { SummonFullParams outer(model); }),
                HasSubstr("'block0' is summoned already"));
    EXPECT_EQ(counters(mesh).all_gathers, gathers);
    const SummonFullParams other(model->blocks[1]);
  });
}

TEST_P(NestedSummons, ARawWriteWhoseChangesAreDroppedIsRefused) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_decoder(mesh, {});
    auto& weight = model->blocks[0]->up->weight;
    {
      const SummonFullParams full(model, {.writeback = false});
      Unsharded raw(weight);
      EXPECT_THAT(message_of<c10::ValueError>([&] { raw.mark_written(); }),
                  AllOf(HasSubstr("up.weight'"), HasSubstr("writeback = false")));
    }
    {
      const SummonFullParams full(model);
      Unsharded raw(weight);
      weight.data_ptr<float>()[0] = 7;
      raw.mark_written();
    }
    EXPECT_EQ(full_value(model->blocks[0]->up->parameters()[0])[0][0].item<float>(), 7);
  });
}

INSTANTIATE_WORLDS(NestedSummons, 1, 2, 3);

// Of a mesh of two dimensions only its first rank: another replica has the same shards.
TEST(SummonedOnRankZero, OfTwoReplicasOnlyOneRankIsFull) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    for (const bool offloads : {false, true}) {
      auto model = sharded_decoder(mesh, {});
      const auto whole = values_of(model);
      const SummonFullParams full(
          model, {.writeback = false, .rank0_only = true, .offload_to_cpu = offloads});
      const auto parameters = model->parameters();
      for (size_t i = 0; i < whole.size(); ++i) {
        ASSERT_EQ(is_dtensor(parameters[i]), rank != 0) << i;
        if (rank == 0) {
          EXPECT_TRUE(parameters[i].equal(whole[i])) << i;
        } else {
          EXPECT_LT(DTensor(parameters[i]).to_local().numel(), whole[i].numel()) << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
