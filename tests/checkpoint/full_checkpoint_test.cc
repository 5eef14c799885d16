// Whole tensors in files that Hugging Face's readers open.
#include "checkpoint/checkpoint.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/safetensors.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>
#include <set>

namespace fsdp::testing {
namespace {

using internal::checkpoint::Header;
using internal::checkpoint::InputFile;
using internal::checkpoint::Json;
using internal::checkpoint::lengths_of;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

Header header_of(const std::string& path) {
  return internal::checkpoint::read_header(InputFile::open(path).value()).value();
}

Json json_of(const std::string& path) {
  return Json::parse(internal::checkpoint::read_file(path).value());
}

std::set<std::string> data_files(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") names.insert(entry.path().filename());
  }
  return names;
}

void save_full(const std::string& path, int64_t world, SaveOptions options = {}) {
  options.layout = Layout::kFull;
  run_ranks(world, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, 1);
    save({.model = model}, path, options);
  });
}

void expect_loads(const std::string& path, int64_t world) {
  run_ranks(world, [&](int64_t rank) {
    SmallModel model, expected;
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, 6);
    fill(*expected, 1);
    load({.model = model}, path);
    const auto want = full_values(*expected);
    for (const auto& item : full_values(*model)) {
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << rank << " " << item.key();
    }
  });
}

TEST(FullCheckpoint, HoldsWholeTensorsInOneFileAndLoadsAnywhere) {
  for (const int64_t world : {1, 2, 3}) {
    TemporaryFolder folder;
    save_full(folder / "saved", world);
    EXPECT_EQ(data_files(folder / "saved/model"), std::set<std::string>{"model.safetensors"});
    const Header header = header_of(folder / "saved/model/model.safetensors");
    SmallModel model;
    const auto whole = full_values(*model);
    EXPECT_EQ(header.entries.size(), whole.size());
    for (const auto& entry : header.entries) {
      EXPECT_EQ(c10::IntArrayRef(lengths_of(entry.box)), whole[entry.name].sizes()) << entry.name;
    }
    EXPECT_EQ(header.metadata.at("format"), "pt");
    EXPECT_EQ(header.metadata.count("DCP_SHARDING_INFO"), 0u);
    verify_checkpoint(folder / "saved");
    for (const int64_t to : {1, 2, 3}) expect_loads(folder / "saved", to);
  }
}

TEST(FullCheckpoint, FilesEndAtTheirLimitAndAnIndexNamesEveryTensor) {
  constexpr int64_t kLimit = 100;
  TemporaryFolder folder;
  save_full(folder / "saved", 2, {.max_file_bytes = kLimit});
  const auto index = json_of(folder / "saved/model/model.safetensors.index.json");
  SmallModel model;
  std::set<std::string> named, used;
  int64_t bytes = 0;
  for (const auto& file : data_files(folder / "saved/model")) {
    const Header header = header_of(folder / ("saved/model/" + file));
    EXPECT_TRUE(header.entries.back().end <= kLimit || header.entries.size() == 1) << file;
    bytes += header.entries.back().end;
    for (const auto& entry : header.entries) {
      EXPECT_EQ(index.at("weight_map").at(entry.name), file);
      named.insert(entry.name);
    }
    used.insert(file);
  }
  EXPECT_EQ(named.size(), full_values(*model).size());
  EXPECT_EQ(index.at("weight_map").size(), named.size());
  EXPECT_EQ(index.at("metadata").at("total_size"), bytes);
  EXPECT_GE(used.size(), 3u);
  const auto last = std::to_string(used.size());
  EXPECT_EQ(used.count("model-0000" + last + "-of-0000" + last + ".safetensors"), 1u);
  std::set<int64_t> writers;
  const auto manifest = json_of(folder / "saved/checkpoint.json");
  for (const auto& [name, file] : manifest.at("files").items()) {
    writers.insert(file.at("rank").get<int64_t>());
  }
  EXPECT_EQ(writers, (std::set<int64_t>{0, 1}));  // in turn
  // Without the manifest the index says which files count.
  fs::copy(folder / ("saved/model/model-00001-of-0000" + last + ".safetensors"),
           folder / "saved/model/consolidated.safetensors");
  expect_loads(folder / "saved/model", 3);
}

TEST(FullCheckpoint, TheIndexIsVerified) {
  TemporaryFolder folder;
  save_full(folder / "saved", 2, {.max_file_bytes = 100});
  verify_checkpoint(folder / "saved");
  const auto path = folder / "saved/model/model.safetensors.index.json";
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(30).put('x');
  expect_error([&] { verify_checkpoint(folder / "saved"); }, HasSubstr("index.json"));
}

TEST(FullCheckpoint, ModelDtypeIsForFloatingTensorsOfModels) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    save({.model = model, .tensors = {{"ema", torch::ones({3})}}}, folder / "saved",
         {.layout = Layout::kFull, .model_dtype = torch::kBFloat16});
    EXPECT_THAT(message_of([&] {
                  save({.model = model}, folder / "other", {.model_dtype = torch::kBFloat16});
                }),
                HasSubstr("model_dtype is of Layout::kFull only"));
    EXPECT_THAT(message_of([&] {
                  save({.model = model}, folder / "other",
                       {.layout = Layout::kFull, .model_dtype = torch::kLong});
                }),
                HasSubstr("model_dtype is Long"));
  });
  for (const auto& entry : header_of(folder / "saved/model/model.safetensors").entries) {
    const bool counts = entry.name == "norm.num_batches_tracked";
    EXPECT_EQ(entry.dtype, counts ? torch::kLong : torch::kBFloat16) << entry.name;
  }
  EXPECT_EQ(header_of(folder / "saved/tensors/model.safetensors").entries[0].dtype, torch::kFloat);
}

TEST(FullCheckpoint, PlainTensorsAreRankZeros) {
  TemporaryFolder folder;
  run_ranks(3, [&](int64_t rank) {
    std::map<std::string, at::Tensor> tensors;
    for (int i = 0; i < 3; ++i) tensors["t" + std::to_string(i)] = torch::full({4}, rank + 10 * i);
    save({.tensors = tensors}, folder / "saved", {.layout = Layout::kFull, .max_file_bytes = 1});
    load({.tensors = tensors}, folder / "saved");
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::equal(tensors["t" + std::to_string(i)], torch::full({4}, 10 * i)));
    }
  });
}

TEST(FullCheckpoint, TensorsOfAnyMeshAndPlacementAreGathered) {
  using Placements = std::vector<Placement>;
  const std::vector<std::pair<std::vector<int64_t>, Placements>> cases = {
      {{4}, {Shard{0}}},
      {{4}, {Shard{1}}},
      {{4}, {Replicate{}}},
      {{2, 2}, {Replicate{}, Shard{0}}},
      {{2, 2}, {Shard{0}, Shard{1}}},
      {{2, 2}, {Shard{0}, Shard{0}}}};
  TemporaryFolder folder;
  const auto whole = torch::arange(35, torch::kDouble).view({7, 5});
  run_ranks(4, [&](int64_t) {
    std::map<std::string, at::Tensor> tensors;
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto mesh = init_device_mesh(torch::kCPU, cases[i].first);
      tensors[std::to_string(i)] =
          distribute_tensor(whole + static_cast<int64_t>(i), mesh, cases[i].second);
    }
    save({.tensors = tensors}, folder / "saved", {.layout = Layout::kFull, .max_file_bytes = 600});
  });
  std::map<std::string, at::Tensor> loaded;
  for (size_t i = 0; i < cases.size(); ++i) {
    loaded[std::to_string(i)] = torch::zeros({7, 5}, torch::kDouble);
  }
  load({.tensors = loaded}, folder / "saved");
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(torch::equal(loaded[std::to_string(i)], whole + static_cast<int64_t>(i))) << i;
  }
}

TEST(FullCheckpoint, AFullDiskOfOneRankIsEveryRanksErrorAndLeavesNothing) {
  TemporaryFolder folder;
  internal::checkpoint::set_file_call_hook([](std::string_view call, const std::string& path) {
    return call == "write" && path.ends_with("model-00002-of-00003.safetensors") ? ENOSPC : 0;
  });
  run_ranks(2, [&](int64_t) {
    const std::map<std::string, at::Tensor> tensors = {
        {"a", torch::ones({4})}, {"b", torch::ones({4})}, {"c", torch::ones({4})}};
    EXPECT_THAT(message_of([&] {
                  save({.tensors = tensors}, folder / "saved",
                       {.layout = Layout::kFull, .max_file_bytes = 16});
                }),
                HasSubstr("rank 1: write"));
  });
  internal::checkpoint::set_file_call_hook(nullptr);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FullCheckpoint, RanksWithDifferentModelsAreRefused) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    const std::map<std::string, at::Tensor> tensors = {
        {"t" + std::to_string(rank), torch::ones({4})}};
    EXPECT_THAT(message_of([&] {
                  save({.tensors = tensors}, folder / "saved", {.layout = Layout::kFull});
                }),
                HasSubstr("the ranks' models differ"));
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace fsdp::testing
