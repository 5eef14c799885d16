// Files that somebody else wrote: fixtures/make_fixtures.py says how.
#include "checkpoint/checkpoint.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/catalog/dcp_folder.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/torch_file.h"
#include "checkpoint/optimizer_state_dict.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

namespace fsdp::testing {
namespace {

using internal::checkpoint::InputFile;
using internal::checkpoint::Pickle;
using internal::checkpoint::read_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::string fixture(const std::string& name) { return "tests/checkpoint/fixtures/" + name; }

std::string in_model(const std::string& name) { return "model." + name; }

// The values that every fixture has, at several worlds.
void expect_loads(const std::string& path, const LoadOptions& options = {}) {
  for (const int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      SmallModel model, expected;
      shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
      fill(*model, 6);
      fill(*expected, 1);
      const auto loaded = load({.model = model}, path, options);
      EXPECT_TRUE(loaded.missing.empty());
      const auto want = full_values(*expected);
      for (const auto& item : full_values(*model)) {
        EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << rank << " " << item.key();
      }
    });
  }
}

TEST(ForeignFiles, AHuggingFaceFolderIsReadByItsIndex) { expect_loads(fixture("hugging_face")); }

TEST(ForeignFiles, ShardsOfPythonsHuggingFaceWriter) { expect_loads(fixture("shards")); }

TEST(ForeignFiles, AStateDictOfTorchSave) { expect_loads(fixture("state_dict.pt")); }

TEST(ForeignFiles, AStateDictInADictionaryIsFoundByItsKeys) {
  expect_loads(fixture("nested.pt"), {.name_in_file = in_model});
}

TEST(ForeignFiles, AFolderOfPythonsDistributedCheckpoint) {
  // The optimizer's tensors are in it too.
  expect_loads(fixture("dcp"), {.strict = false, .name_in_file = in_model});
  SmallModel model;
  const auto loaded =
      load({.model = model}, fixture("dcp"), {.strict = false, .name_in_file = in_model});
  EXPECT_TRUE(std::any_of(
      loaded.unexpected.begin(), loaded.unexpected.end(),
      [](const std::string& name) { return name == "optim.state.first.weight.exp_avg"; }));
}

// The state's tensors of Python's optimizer, into one of ours that has stepped.
TEST(ForeignFiles, TheTensorsOfPythonsOptimizerGoInByAStateDict) {
  SmallModel model;
  fill(*model, 1);
  model->frozen.set_requires_grad(false);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  model->forward(torch::rand({4, 5})).sum().backward();
  optimizer.step();
  EXPECT_THAT(message_of([&] { load({.model = model, .optimizer = optimizer}, fixture("dcp")); }),
              HasSubstr("an optimizer is loaded from what save() made"));
  auto dict = get_optimizer_state_dict(*model, optimizer);
  std::map<std::string, at::Tensor> tensors;
  for (auto& [name, fields] : dict.state) {
    fields["step"] = int64_t{5};
    tensors["optim.state." + name + ".step"] = torch::zeros({});
    for (const std::string field : {"exp_avg", "exp_avg_sq"}) {
      fields[field] = torch::full_like(fields.at(field).toTensor(), -1);
      tensors["optim.state." + name + "." + field] = fields.at(field).toTensor();
    }
  }
  EXPECT_TRUE(load({.tensors = tensors}, fixture("dcp"), {.strict = false}).missing.empty());
  set_optimizer_state_dict(*model, optimizer, dict);
  EXPECT_EQ(tensors.at("optim.state.last.bias.step").item<float>(), 1);
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
    EXPECT_TRUE((adam.exp_avg_sq() >= 0).all().item<bool>());
    // One step: both averages are of one gradient.
    EXPECT_TRUE(torch::allclose(adam.exp_avg().pow(2) / 0.01, adam.exp_avg_sq() / 0.001));
  }
}

TEST(ForeignFiles, OneSafetensorsFileOfAnyName) {
  TemporaryFolder folder;
  const std::map<std::string, at::Tensor> saved = {{"w", torch::arange(6)}};
  save({.tensors = saved}, folder / "saved");
  fs::copy(folder / "saved/tensors/model.safetensors", folder / "weights");
  auto w = torch::zeros({6}, torch::kLong);
  load({.tensors = {{"w", w}}}, folder / "weights");
  EXPECT_TRUE(torch::equal(w, torch::arange(6)));
}

TEST(ForeignFiles, ACutOffFileOfTorchSaveIsRefused) {
  TemporaryFolder folder;
  const std::string bytes = *read_file(fixture("state_dict.pt"));
  std::ofstream(folder / "cut.pt", std::ios::binary) << bytes.substr(0, bytes.size() / 2);
  SmallModel model;
  EXPECT_THAT(message_of([&] { load({.model = model}, folder / "cut.pt"); }),
              HasSubstr("not a file of torch.save that can be read"));
}

TEST(ForeignFiles, ATransposedTensorIsReadByItsStrides) {
  SmallModel expected;
  fill(*expected, 1);
  const auto read = torch::zeros({5, 7});
  load({.tensors = {{"first.weight", read}}}, fixture("transposed.pt"));
  EXPECT_TRUE(torch::equal(read, expected->first->weight.t()));
}

TEST(ForeignFiles, AMissingDataFileIsNoticedBeforeAnythingIsWritten) {
  TemporaryFolder folder;
  fs::copy(fixture("dcp"), folder / "dcp");
  fs::remove(folder / "dcp/__1_0.distcp");
  SmallModel model, expected;
  fill(*model, 4), fill(*expected, 4);
  EXPECT_THAT(message_of([&] {
                load({.model = model}, folder / "dcp", {.strict = false, .name_in_file = in_model});
              }),
              HasSubstr("__1_0.distcp: No such file"));
  EXPECT_TRUE(torch::equal(model->first->weight, expected->first->weight));
}

TEST(ForeignFiles, AChangedNumberOfTorchSaveIsToldWithItsRecord) {
  const std::string whole = *read_file(fixture("state_dict.pt"));
  TemporaryFolder folder;
  const auto write = [&](const std::string& bytes) {
    std::ofstream(folder / "file", std::ios::binary | std::ios::trunc) << bytes;
  };
  const auto load_it = [&] {
    SmallModel model;
    return message_of([&] { load({.model = model}, folder / "file"); });
  };
  write(whole);
  const auto file = InputFile::open(folder / "file").value();
  const auto found = internal::checkpoint::tensors_of_archive(file, 0, file.bytes()).value();
  ASSERT_GE(found.tensors.size(), 3u);
  for (const auto& tensor : found.tensors) {
    std::string damaged = whole;
    auto& byte = damaged[static_cast<size_t>(tensor.begin)];
    byte = static_cast<char>(byte ^ 1);
    write(damaged);
    EXPECT_THAT(load_it(), AllOf(HasSubstr("'" + tensor.name + "'"), HasSubstr("record 'data/"),
                                 HasSubstr("CRC-32")));
  }
  std::string damaged = whole;
  damaged[damaged.find("first.weight")] = 'F';  // in data.pkl
  write(damaged);
  EXPECT_THAT(load_it(), AllOf(HasSubstr("record 'data.pkl'"), HasSubstr("CRC-32")));
}

// Pickles and archives that are damaged at random end in an error or in a result, never
// in a crash.
TEST(ForeignFiles, DamagedPicklesDoNotCrash) {
  const std::string whole = *read_file(fixture("dcp/.metadata"));
  ASSERT_TRUE(Pickle::parse(whole, "whole").ok());
  for (size_t i = 0; i < whole.size(); i += 7) {
    EXPECT_FALSE(Pickle::parse(whole.substr(0, i), "cut").ok()) << i;
  }
  TemporaryFolder folder;
  fs::create_directory(folder / "dcp");
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = whole;
    for (int change = 0; change < 1 + round % 3; ++change) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    std::ofstream(folder / "dcp/.metadata", std::ios::binary | std::ios::trunc) << damaged;
    refused += internal::checkpoint::catalog_of_dcp_folder(folder / "dcp").ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 300);
}

TEST(ForeignFiles, DamagedArchivesDoNotCrash) {
  const std::string whole = *read_file(fixture("state_dict.pt"));
  TemporaryFolder folder;
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string damaged = whole;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    std::ofstream(folder / "file", std::ios::binary | std::ios::trunc) << damaged;
    const auto file = InputFile::open(folder / "file").value();
    refused += internal::checkpoint::tensors_of_archive(file, 0, file.bytes()).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace fsdp::testing
