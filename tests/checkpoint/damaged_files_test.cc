// Files that were damaged, cut off or lost.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kNothing = "nothing was thrown";

TEST(Damage, EveryFlippedByteAndEveryTruncationIsNoticed) {
  TemporaryFolder folder;
  save({.tensors = {{"w", torch::arange(10)}, {"b", torch::ones({3}, torch::kBool)}}},
       folder / "saved");
  for (const auto& entry : fs::recursive_directory_iterator(folder / "saved")) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    const auto load_with = [&](const std::string& bytes) {
      std::ofstream(entry.path(), std::ios::binary | std::ios::trunc) << bytes;
      auto w = torch::zeros({10}, torch::kLong), b = torch::zeros({3}, torch::kBool);
      return message_of([&] { load({.tensors = {{"w", w}, {"b", b}}}, folder / "saved"); });
    };
    for (size_t i = 0; i < whole.size(); ++i) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ 1);
      EXPECT_NE(load_with(damaged), kNothing) << entry.path() << " byte " << i;
      if (i % 16 != 0) continue;
      EXPECT_NE(load_with(whole.substr(0, i)), kNothing) << entry.path();
    }
    EXPECT_EQ(load_with(whole), kNothing) << entry.path();
  }
}

TEST(Damage, VerifyFindsDamageInWhatNobodyLoads) {
  TemporaryFolder folder;
  save({.tensors = {{"w", torch::zeros({400'000})}}}, folder / "saved");
  verify_checkpoint(folder / "saved");
  const auto file = folder / "saved/tensors/model.safetensors";
  std::fstream(file, std::ios::binary | std::ios::in | std::ios::out).seekp(1'200'000).put('x');
  EXPECT_THAT(message_of([&] { verify_checkpoint(folder / "saved"); }),
              HasSubstr("MiB 1 is damaged; it holds 'w'"));
}

// Large enough that two threads share the reading, somewhere within 'b'.
TEST(Damage, LargeTensorsAreReadWholeAndEachOfTheirMiBsIsChecked) {
  TemporaryFolder folder;
  const auto values = [] {
    std::map<std::string, at::Tensor> tensors;
    tensors["a"] = torch::arange(400'003).to(torch::kFloat);
    tensors["b"] = torch::arange(1'900'001).to(torch::kFloat);
    tensors["c"] = torch::arange(500'021).to(torch::kFloat);
    return tensors;
  };
  save({.tensors = values()}, folder / "saved");
  auto loaded = values();
  for (auto& [name, tensor] : loaded) tensor.zero_();
  load({.tensors = loaded}, folder / "saved");
  for (const auto& [name, tensor] : values()) EXPECT_TRUE(torch::equal(loaded[name], tensor));
  auto converted = values();
  for (auto& [name, tensor] : converted) tensor = torch::zeros_like(tensor, torch::kDouble);
  load({.tensors = converted}, folder / "saved");
  for (const auto& [name, tensor] : values()) {
    EXPECT_TRUE(torch::equal(converted[name], tensor.to(torch::kDouble)));
  }
  const std::string file = folder / "saved/tensors/model.safetensors";
  const auto blocks = static_cast<int64_t>(fs::file_size(file) >> 20) + 1;
  EXPECT_EQ(blocks, 11);
  for (int64_t block = 0; block < blocks; ++block) {
    std::fstream bytes(file, std::ios::binary | std::ios::in | std::ios::out);
    const auto flip = [&] {
      bytes.seekg((block << 20) + 50'000);
      const int was = bytes.get();
      bytes.seekp((block << 20) + 50'000).put(static_cast<char>(was ^ 1)).flush();
    };
    flip();
    EXPECT_THAT(message_of([&] { load({.tensors = loaded}, folder / "saved"); }),
                HasSubstr("MiB " + std::to_string(block) + " is damaged"));
    flip();
  }
  load({.tensors = loaded}, folder / "saved");
}

TEST(Damage, MissingFilesAreNoticedBeforeAnythingIsWritten) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    save({.model = model}, folder / "saved");
  });
  fs::remove(folder / "saved/model/shard-00002-model-00001-of-00001.safetensors");
  SmallModel model;
  fill(*model, 4);
  EXPECT_THAT(message_of([&] { load({.model = model}, folder / "saved"); }),
              HasSubstr("shard-00002-model-00001-of-00001.safetensors: No such file"));
  // Without the manifest its shards are just files: those that are there do not cover.
  EXPECT_THAT(message_of([&] { load({.model = model}, folder / "saved/model"); }),
              HasSubstr("elements are in the files: some are missing"));
  SmallModel expected;
  fill(*expected, 4);
  EXPECT_TRUE(torch::equal(model->first->weight, expected->first->weight));
}

}  // namespace
}  // namespace fsdp::testing
