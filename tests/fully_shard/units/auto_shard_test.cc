// auto_shard(): the units that a policy chose are those that fully_shard makes by hand,
// in numbers, options and traffic.
#include "fully_shard/units/unit.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/fully_shard/units/planned_modules.h"
#include "tests/fully_shard/units/unit_names.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::nn::Linear;
using torch::nn::Module;

// A decoder of four blocks whose units are the blocks and the root, which has the rest.
class MeasuredBlocks {
 public:
  using ShardDecoder = std::function<void(Decoder&)>;
  MeasuredBlocks(const DeviceMesh& mesh, const ShardDecoder& shard) : mesh_(mesh) {
    build_seeded([this] {
      model = Decoder(8, kBlocks);
      return Model{model.ptr(), {}};
    });
    shard(model);
  }

  Traffic forward() {
    return traffic_of(mesh_, [this] { loss_ = loss_of(model, make_data(5)); });
  }
  Traffic backward() {
    return traffic_of(mesh_, [this] { loss_.backward(); });
  }
  // Gathers to have block `i` unsharded now: none where it is still.
  int64_t gathers_of_block(size_t i) {
    auto unit = get_fsdp_module(*model->blocks[i]);
    return traffic_of(mesh_, [&] { unit.unshard(); }).all_gathers;
  }

  Decoder model{nullptr};

 private:
  DeviceMesh mesh_;
  torch::Tensor loss_;
};

void expect_same(const Traffic& a, const Traffic& b) {
  EXPECT_EQ(a.all_gathers, b.all_gathers);
  EXPECT_EQ(a.reduce_scatters, b.reduce_scatters);
  EXPECT_EQ(a.all_gather_bytes, b.all_gather_bytes);
}

class AutoShard : public Worlds {
 protected:
  // World 1 sends nothing.
  int64_t sent(int64_t messages) const { return world() == 1 ? 0 : messages; }
};

TEST_P(AutoShard, ByTypeMakesEveryBlockAndTheRootUnitsAsByHand) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks chosen(mesh, [&](Decoder& model) {
      EXPECT_TRUE(auto_shard(model, by_type<Block>(), mesh).is_root());
    });
    MeasuredBlocks by_hand(mesh, [&](Decoder& model) {
      for (auto& block : model->blocks) fully_shard(block, mesh);
      fully_shard(model, mesh);
    });
    EXPECT_THAT(names(fsdp_modules(*chosen.model)),
                ElementsAre("", "block0", "block1", "block2", "block3"));
    for (int step = 0; step < 2; ++step) {
      const auto forward = chosen.forward();
      EXPECT_EQ(forward.all_gathers, sent(kBlocks + 1)) << step;
      expect_same(forward, by_hand.forward());
      const auto backward = chosen.backward();
      EXPECT_EQ(backward.reduce_scatters, sent(kBlocks + 1)) << step;
      EXPECT_EQ(backward.all_gathers, sent(kBlocks - 1)) << step;
      expect_same(backward, by_hand.backward());
    }
  });
}

TEST_P(AutoShard, HasTheUnshardedNumbers) {
  const auto shard = [](Module& module, const DeviceMesh& mesh) {
    auto_shard(module, by_any({by_type<Block>(), by_size(50)}), mesh);
  };
  expect_parity(
      world(), [] { return decoder_model(6, 2); }, shard, "auto_shard");
}

TEST_P(AutoShard, GivesEveryUnitTheOptionsOfTheRoot) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks kept(mesh, [&](Decoder& model) {
      auto_shard(model, by_type<Block>(), mesh,
                 {.reshard_after_forward = false, .mp_policy = {.param_dtype = torch::kBFloat16}});
    });
    kept.forward();
    EXPECT_EQ(kept.backward().all_gathers, 0);
    for (const auto& block : kept.model->blocks)
      EXPECT_EQ(block->up->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(kept.model->head->weight.scalar_type(), torch::kBFloat16);
  });
}

TEST_P(AutoShard, ByFnMayGiveOneUnitOtherOptions) {
  on_ranks([&](const DeviceMesh& mesh) {
    MeasuredBlocks decoder(mesh, [&](Decoder& model) {
      const auto second = model->blocks[1].get();
      const auto keep_the_second =
          [second](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
        if (module.as<Block>() == nullptr) return std::nullopt;
        if (&module == second) options.reshard_after_forward = false;
        return options;
      };
      auto_shard(model, by_fn(keep_the_second), mesh);
    });
    EXPECT_EQ(fsdp_modules(*decoder.model).size(), kBlocks + 1u);
    decoder.forward();
    // The last one stays, as it is first in backward.
    const std::vector<int64_t> gathers = {sent(1), 0, sent(1), 0};
    for (size_t i = 0; i < gathers.size(); ++i)
      EXPECT_EQ(decoder.gathers_of_block(i), gathers[i]) << i;
  });
}

TEST_P(AutoShard, TheFirstOfSeveralPoliciesThatChoosesGivesTheOptions) {
  on_ranks([&](const DeviceMesh& mesh) {
    Pair model;
    const auto with = [](at::ScalarType dtype) {
      return by_fn(
          [dtype](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
            options.mp_policy.param_dtype = dtype;
            return module.as<Linear>() ? std::optional(options) : std::nullopt;
          });
    };
    auto_shard(model, by_any({exactly({}), with(torch::kBFloat16), with(torch::kHalf)}), mesh);
    EXPECT_EQ(model->first->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(model->second->weight.scalar_type(), torch::kBFloat16);
  });
}

TEST_P(AutoShard, MakesUnitsInPostOrderAsPlannedAndPlanningMakesNone) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto root =
        stage({{"b", stage({{"c", linear(2, 2)}, {"d", linear(2, 2)}})}, {"a", linear(2, 2)}});
    const auto plan = plan_units(root, every_module());
    EXPECT_THAT(planned_paths(plan), ElementsAre("b.c", "b.d", "b", "a", ""));
    EXPECT_THAT(fsdp_modules(*root), IsEmpty());
    for (const auto& parameter : root->parameters()) EXPECT_FALSE(is_dtensor(parameter));
    EXPECT_EQ(plan_units(root, every_module()), plan);

    auto_shard(root, every_module(), mesh);
    auto units = fsdp_modules(*root);
    std::sort(units.begin(), units.end(), [](const FSDPModule& a, const FSDPModule& b) {
      return internal::unit_of(a)->id < internal::unit_of(b)->id;
    });
    EXPECT_EQ(names(units), planned_paths(plan));
  });
}

TEST_P(AutoShard, LeavesWhatTheRootIgnoresPlainInUnitsWithOtherOptionsToo) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    const auto own_options =
        by_fn([](Module& module, FullyShardOptions) -> std::optional<FullyShardOptions> {
          return module.as<Linear>() ? std::optional(FullyShardOptions()) : std::nullopt;
        });
    const std::vector<at::Tensor> ignored = {model->first->weight, model->second->weight,
                                             model->second->bias};
    EXPECT_EQ(plan_units(model, own_options, {.ignored_params = ignored}).units[0].numel, 4);
    auto_shard(model, own_options, mesh, {.ignored_params = ignored});
    EXPECT_FALSE(is_dtensor(model->first->parameters()[0]));
    EXPECT_TRUE(is_dtensor(model->first->parameters()[1]));
    EXPECT_FALSE(is_dtensor(model->second->parameters()[0]));
    EXPECT_TRUE(is_fsdp_module(*model->first));
    EXPECT_FALSE(is_fsdp_module(*model->second)) << "all of it is ignored";
  });
}

TEST_P(AutoShard, KeepsTiesAcrossUnits) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto tied = torch::ones({8});
    const auto first = stage({}), second = stage({});
    for (const auto& module : {first, second}) module->register_parameter("weight", tied);
    const auto root = stage({{"first", first}, {"second", second}});
    auto_shard(root, exactly({first, second}), mesh);
    EXPECT_TRUE(is_dtensor(first->parameters()[0]));
    EXPECT_TRUE(first->parameters()[0].is_same(second->parameters()[0]));
  });
}

TEST_P(AutoShard, MakesASharedModuleOneUnitAndRefusesItInTwoAsFullyShardDoes) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto shared = linear(2, 2);
    const auto a = stage({{"s", shared}}), b = stage({{"s", shared}});
    const auto root = stage({{"a", a}, {"b", b}});
    expect_error<c10::ValueError>(
        [&] {
          auto_shard(root, exactly({a, b}), mesh);
        },
        HasSubstr("in unit 'a' and in unit 'b'"));
    EXPECT_THAT(fsdp_modules(*root), IsEmpty());
    auto_shard(root, exactly({shared, a, b}), mesh);
    EXPECT_THAT(names(fsdp_modules(*root)), ElementsAre("", "a", "a.s", "b"));

    const auto other = linear(2, 2);
    const auto c = stage({{"s", other}}), d = stage({{"s", other}});
    fully_shard(c, mesh);
    expect_error<c10::ValueError>([&] { fully_shard(d, mesh); }, HasSubstr("'s.weight'"));
  });
}

void expect_no_unit(Module& root) {
  EXPECT_THAT(fsdp_modules(root), IsEmpty());
  for (const auto& parameter : root.parameters()) EXPECT_FALSE(is_dtensor(parameter));
}

TEST_P(AutoShard, RefusesATreeWithAUnitByNameAndChangesNothing) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    fully_shard(model->second, mesh);
    expect_error<c10::ValueError>(
        [&] { auto_shard(model, by_type<Linear>(), mesh); },
        AllOf(HasSubstr("auto_shard: module 'second' (torch::nn::LinearImpl) is a unit already"),
              HasSubstr("rank " + std::to_string(mesh.rank()))));
    expect_no_unit(*model->first);
    EXPECT_FALSE(is_fsdp_module(*model));
    fully_shard(model, mesh);
    expect_error<c10::ValueError>([&] { auto_shard(model, by_type<Linear>(), mesh); },
                                  HasSubstr("module '(root)'"));
  });
}

TEST_P(AutoShard, ChecksAllUnitsBeforeTheFirstIsMade) {
  on_ranks([&](const DeviceMesh& mesh) {
    Pair model;
    const auto shard = [&](const FullyShardOptions& options) {
      auto_shard(model, by_type<Linear>(), mesh, options);
    };
    const auto too_many = ReshardAfterForward::to_world(world() + 1);
    expect_error<c10::ValueError>([&] { shard({.reshard_after_forward = too_many}); },
                                  HasSubstr("auto_shard: ReshardAfterForward::to_world("));
    expect_no_unit(*model);
    expect_error<c10::ValueError>([&] { shard({.ignored_params = {torch::ones({2})}}); },
                                  HasSubstr("ignored_params[0]"));
    expect_no_unit(*model);
    model->second->register_parameter("scalar", torch::ones({}));
    expect_error<c10::ValueError>(
        [&] { shard({}); },
        AllOf(HasSubstr("parameter 'scalar'"), HasSubstr("is a scalar"),
              HasSubstr("auto_shard would make module 'second' (torch::nn::LinearImpl) a unit")));
    expect_no_unit(*model);
    EXPECT_NO_THROW(shard({.ignored_params = {model->second->named_parameters()["scalar"]}}));
    expect_error<c10::ValueError>(
        [&] { auto_shard(std::shared_ptr<Stage>(), every_module(), mesh); },
        HasSubstr("auto_shard: the module is null"));
  });
}

// What a deeper unit's own options ignore is nothing for the units around it to refuse.
TEST_P(AutoShard, WhatOneUnitIgnoresTheUnitsAroundItDoNotTake) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    model->second->register_parameter("scalar", torch::ones({}));
    const auto without_scalars =
        by_fn([](Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
          if (module.as<Linear>() == nullptr) return std::nullopt;
          for (const auto& parameter : module.parameters()) {
            if (parameter.dim() == 0) options.ignored_params.push_back(parameter);
          }
          return options;
        });
    EXPECT_THAT(planned_numels(model.ptr(), without_scalars), ElementsAre(20, 20, 0));
    auto_shard(model, without_scalars, mesh);
    EXPECT_FALSE(is_dtensor(model->second->named_parameters()["scalar"]));
    EXPECT_NO_THROW(model(torch::ones({2, 4})).sum().backward());
  });
}

INSTANTIATE_WORLDS(AutoShard, 1, 2);

TEST(AutoShardHybrid, AllUnitsHaveTheRootsTwoGroups) {
  on_ranks_of(4, [](int64_t, const DeviceMesh&) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    MeasuredBlocks decoder(mesh,
                           [&](Decoder& model) { auto_shard(model, by_type<Block>(), mesh); });
    for (const auto& parameter : decoder.model->parameters()) {
      const DTensor entry(parameter);
      EXPECT_EQ(entry.device_mesh().group(0), mesh.group(0));
      EXPECT_EQ(entry.device_mesh().group(1), mesh.group(1));
      EXPECT_EQ(entry.placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
    }
    decoder.forward();
    const auto backward = decoder.backward();
    EXPECT_EQ(backward.reduce_scatters, kBlocks + 1);
    EXPECT_EQ(backward.all_reduces, kBlocks + 1);
  });
}

}  // namespace
}  // namespace fsdp::testing
