// What is saved besides tensors of models: values, per-rank items, generators.
#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "dtensor/manual_seed.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

TEST(Values, ValuesOfEveryKindComeBack) {
  TemporaryFolder folder;
  c10::Dict<std::string, double> dict;
  dict.insert("double", 0.5);
  save({.values = {{"i", int64_t{1} << 60},
                   {"d", 0.1},
                   {"whole", 2.0},
                   {"nan", std::nan("")},
                   {"s", "x\n\xC3\xA4"},
                   {"b", true},
                   {"none", c10::IValue()},
                   {"list", std::vector<int64_t>{1, 2}},
                   {"dict", dict}}},
       folder / "saved");
  const auto values = load({}, folder / "saved").values;
  EXPECT_EQ(values.at("i").toInt(), int64_t{1} << 60);
  EXPECT_EQ(values.at("d").toDouble(), 0.1);
  EXPECT_TRUE(values.at("whole").isDouble());
  EXPECT_TRUE(std::isnan(values.at("nan").toDouble()));
  EXPECT_EQ(values.at("s").toStringRef(), "x\n\xC3\xA4");
  EXPECT_TRUE(values.at("b").toBool());
  EXPECT_TRUE(values.at("none").isNone());
  EXPECT_EQ(values.at("list").toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(values.at("dict").toGenericDict().at("double").toDouble(), 0.5);
}

TEST(Values, PerRankItemsAreEachRanksOwnAndRefuseAnotherWorld) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    save({.per_rank = {{"place", rank * 10}, {"order", torch::full({3}, rank)}}}, folder / "saved");
    const auto loaded = load({}, folder / "saved");
    EXPECT_EQ(loaded.per_rank.at("place").toInt(), rank * 10);
    EXPECT_TRUE(torch::equal(loaded.per_rank.at("order").toTensor(), torch::full({3}, rank)));
  });
  run_ranks(3, [&](int64_t) {
    try {
      load({}, folder / "saved");
      ADD_FAILURE();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("saved by 2 ranks, loading on 3"));
    }
    const auto skipped = load({}, folder / "saved", {.skip_per_rank = true}).skipped;
    EXPECT_EQ(skipped, (std::vector<std::string>{"order", "place"}));
  });
}

TEST(Values, GeneratorsGoOnWhereTheyWere) {
  TemporaryFolder folder;
  torch::manual_seed(5);
  torch::rand({3});
  save({.rng = true}, folder / "saved");
  const auto next = torch::rand({4});
  torch::manual_seed(6);
  load({.rng = true}, folder / "saved");
  EXPECT_TRUE(torch::equal(torch::rand({4}), next));
}

TEST(Values, GeneratorsOfManualSeedGoOnWhereTheyWereOnEachRank) {
  TemporaryFolder folder;
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    manual_seed(5, mesh["tp"]);
    torch::rand({3});
    save({.rng = true}, folder / "saved");
    const auto next = torch::rand({4});
    use_default_generator();
    load({.rng = true}, folder / "saved");
    EXPECT_TRUE(torch::rand({4}).equal(next));
    manual_seed(6, mesh);
    load({.rng = true}, folder / "saved");
    EXPECT_TRUE(torch::rand({4}).equal(next));
    const auto on_the_mesh = distribute_tensor(torch::zeros({4}), mesh["tp"], {Shard{0}});
    on_the_mesh.normal_();
    EXPECT_THROW(distribute_tensor(torch::zeros({4}), mesh, {Shard{0}, Replicate{}}).normal_(),
                 c10::ValueError);
  });
}

TEST(Values, GeneratorsOfThreadsAreSavedOnlyWhereEachHasItsOwn) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    const std::string message = message_of([&] { save({.rng = true}, folder / "saved"); });
    EXPECT_THAT(message, HasSubstr("with fsdp::manual_seed each has its own"));
  });
}

TEST(Values, WhatWasSavedWithoutManualSeedGoesOnWithoutIt) {
  TemporaryFolder folder;
  torch::manual_seed(5);
  save({.rng = true}, folder / "saved");
  const auto next = torch::rand({4});
  on_one_rank([&](const DeviceMesh& mesh) {
    manual_seed(6, mesh);
    load({.rng = true}, folder / "saved");
    EXPECT_TRUE(torch::rand({4}).equal(next));
  });
}

}  // namespace
}  // namespace fsdp::testing
