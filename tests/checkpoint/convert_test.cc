// Looking at checkpoints and writing them anew in another layout.
#include "checkpoint/convert.h"

#include "checkpoint/checkpoint.h"
#include "checkpoint/inspect.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

struct Training {
  explicit Training(int64_t world, double lr) {
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    optimizer =
        std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(lr));
  }
  SmallModel model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

void save_training(const std::string& path) {
  run_ranks(3, [&](int64_t rank) {
    Training training(3, 0.25);
    fill(*training.model, 2);
    training.model->eval();
    training.model->forward(torch::ones({4, 5})).sum().backward();
    training.optimizer->step();
    fill(*training.model, 1);
    save({.model = training.model,
          .optimizer = training.optimizer,
          .values = {{"epoch", 3}},
          .per_rank = {{"place", rank}}},
         path, {.step = 12});
  });
}

void expect_training(const std::string& path, int64_t world) {
  run_ranks(world, [&](int64_t) {
    Training training(world, 7.0);
    const auto loaded = load({.model = training.model, .optimizer = training.optimizer}, path);
    EXPECT_EQ(loaded.step, 12);
    EXPECT_EQ(loaded.values.at("epoch").toInt(), 3);
    EXPECT_EQ(training.optimizer->param_groups()[0].options().get_lr(), 0.25);
    EXPECT_EQ(training.optimizer->state().size(), 6u);
    SmallModel expected;
    fill(*expected, 1);
    const auto want = full_values(*expected);
    for (const auto& item : full_values(*training.model)) {
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
    }
  });
}

TEST(Convert, ShardedIntoFullAndBackKeepsEverythingButPerRankItems) {
  TemporaryFolder folder;
  save_training(folder / "saved");
  convert_checkpoint(folder / "saved", folder / "full");
  EXPECT_TRUE(fs::exists(folder / "full/model/model.safetensors"));
  verify_checkpoint(folder / "full");
  expect_training(folder / "full", 2);
  convert_checkpoint(folder / "full", folder / "again", {.layout = Layout::kSharded, .ranks = 4});
  EXPECT_TRUE(fs::exists(folder / "again/model/shard-00004-model-00001-of-00001.safetensors"));
  verify_checkpoint(folder / "again");
  expect_training(folder / "again", 2);
}

TEST(Convert, ForeignFilesBecomeACheckpoint) {
  TemporaryFolder folder;
  convert_checkpoint("tests/checkpoint/fixtures/state_dict.pt", folder / "saved");
  verify_checkpoint(folder / "saved");
  SmallModel model, expected;
  fill(*expected, 1);
  load({.model = model}, folder / "saved");
  EXPECT_TRUE(torch::equal(model->first->weight, expected->first->weight));
}

TEST(Convert, DamageAndWrongOptionsLeaveNoTarget) {
  TemporaryFolder folder;
  save_training(folder / "saved");
  EXPECT_THAT(message_of([&] {
                convert_checkpoint(folder / "saved", folder / "to",
                                   {.layout = Layout::kSharded, .ranks = 0});
              }),
              HasSubstr("ConvertOptions::ranks is 0"));
  EXPECT_THAT(message_of([&] { convert_checkpoint(folder / "saved", folder / "saved"); }),
              HasSubstr("overwrite"));
  const auto file = folder / "saved/model/shard-00001-model-00001-of-00001.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_THAT(message_of([&] { convert_checkpoint(folder / "saved", folder / "to"); }),
              HasSubstr("were saved"));
  EXPECT_FALSE(fs::exists(folder / "to"));
}

TEST(Inspect, NamesTensorsLayoutsAndWhatElseThereIs) {
  TemporaryFolder folder;
  save_training(folder / "saved");
  const std::string text = describe_checkpoint(folder / "saved");
  EXPECT_THAT(text, HasSubstr("step 12, saved 20"));
  EXPECT_THAT(text, HasSubstr("by 3 ranks"));
  EXPECT_THAT(text, HasSubstr("model: 11 tensors, "));
  EXPECT_THAT(text, ::testing::ContainsRegex(
                        "first.weight +F32 +\\[7, 5\\] +140 bytes +S\\(0\\) over 3 ranks"));
  EXPECT_THAT(text, HasSubstr("state.first.weight.exp_avg"));
  EXPECT_THAT(text, HasSubstr("value epoch: 3"));
  EXPECT_THAT(text, HasSubstr("per rank: place"));
  EXPECT_THAT(describe_checkpoint("tests/checkpoint/fixtures/dcp"),
              HasSubstr("optim.state.first.weight.exp_avg"));
}

}  // namespace
}  // namespace fsdp::testing
