// Frozen parameters that are stored as codes (store_codes()): checkpoints
// save and load the codes, and state dicts show them.
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/state_dict.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kCodedRows = 13, kCodedColumns = 128;

// A frozen matrix of codes and a bias.
torch::nn::Linear stored_layer(const DeviceMesh& mesh, double factor,
                               const std::shared_ptr<const GatherCodec>& codec = nf4()) {
  auto layer = make_linear(kCodedColumns, kCodedRows);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layer->parameters()) parameter.mul_(factor);
  }
  layer->weight.set_requires_grad(false);
  FullyShardOptions options;
  options.gather_codec_fn = [codec](const std::string&, const at::Tensor& weight) {
    return weight.dim() == 2 ? codec : nullptr;
  };
  fully_shard(layer, mesh, options);
  store_codes(layer);
  return layer;
}

at::Tensor member_of(const torch::nn::Linear& layer) {
  const torch::NoGradGuard no_grad;
  return layer->weight.clone();
}

TEST(StoredCodes, LoadOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  at::Tensor expected;
  on_ranks_of(2, [&](int64_t rank, const DeviceMesh& mesh) {
    const auto layer = stored_layer(mesh, 3);
    save({.model = layer}, folder / "codes");
    const auto member = member_of(layer);
    if (rank == 0) expected = member;
  });
  for (const int64_t world : {1, 2, 3}) {
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      auto layer = stored_layer(mesh, 1);
      EXPECT_FALSE(member_of(layer).equal(expected));
      load({.model = layer}, folder / "codes");
      EXPECT_TRUE(member_of(layer).equal(expected)) << world;
      EXPECT_TRUE(full_value(layer->parameters()[1])
                      .equal(make_linear(kCodedColumns, kCodedRows)->bias * 3));
    });
  }
}

TEST(StoredCodes, AreNotTakenForValues) {
  const TemporaryFolder folder;
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    save({.model = stored_layer(mesh, 3)}, folder / "codes");
    auto plain = make_linear(kCodedColumns, kCodedRows);
    fully_shard(plain, mesh);
    EXPECT_THAT(message_of([&] { load({.model = plain}, folder / "codes"); }),
                HasSubstr("'weight'"));
    EXPECT_TRUE(
        full_value(plain->parameters()[0]).equal(make_linear(kCodedColumns, kCodedRows)->weight));
    save({.model = plain}, folder / "values");
    auto layer = stored_layer(mesh, 3);
    const auto before = member_of(layer);
    EXPECT_THAT(message_of([&] { load({.model = layer}, folder / "values"); }),
                HasSubstr("'weight'"));
    EXPECT_TRUE(member_of(layer).equal(before));
  });
}

// MXFP8 and MXINT8 take as many bytes; what is converted still says which it is.
TEST(StoredCodes, AreNotTakenForThoseOfAnotherCodec) {
  const TemporaryFolder folder;
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    save({.model = stored_layer(mesh, 3, mxfp8())}, folder / "sharded");
  });
  convert_checkpoint(folder / "sharded", folder / "full", {});
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    auto layer = stored_layer(mesh, 1, mxint8());
    const auto before = member_of(layer);
    for (const char* const kept : {"sharded", "full"}) {
      EXPECT_THAT(message_of([&] { load({.model = layer}, folder / kept); }),
                  AllOf(HasSubstr("'weight' is codes of 'MXINT8' here"),
                        HasSubstr("codes of 'MXFP8' in the file")));
    }
    EXPECT_TRUE(member_of(layer).equal(before));
  });
}

TEST(StoredCodes, ADamagedFileIsRefusedWithNothingChanged) {
  const TemporaryFolder folder;
  on_one_rank([&](const DeviceMesh& mesh) {
    auto layer = stored_layer(mesh, 3);
    save({.model = layer}, folder / "codes");
    auto other = stored_layer(mesh, 1);
    const auto before = member_of(other);
    int64_t files = 0;
    for (const auto& file : std::filesystem::recursive_directory_iterator(folder / "codes")) {
      if (file.path().extension() != ".safetensors") continue;
      ++files;
      std::ifstream in(file.path(), std::ios::binary);
      const std::string whole((std::istreambuf_iterator<char>(in)), {});
      auto flipped = whole;
      flipped[whole.size() - 5] ^= 1;
      for (const auto& damaged : {whole.substr(0, whole.size() - 1), flipped}) {
        std::ofstream(file.path(), std::ios::binary | std::ios::trunc) << damaged;
        EXPECT_ANY_THROW(load({.model = other}, folder / "codes"));
        EXPECT_TRUE(member_of(other).equal(before));
      }
      std::ofstream(file.path(), std::ios::binary | std::ios::trunc) << whole;
    }
    EXPECT_EQ(files, 1);
    load({.model = other}, folder / "codes");
    EXPECT_TRUE(member_of(other).equal(member_of(layer)));
  });
}

TEST(StoredCodes, GoThereAndBackInStateDicts) {
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    const auto from = stored_layer(mesh, 3);
    auto to = stored_layer(mesh, 1);
    const auto values = get_model_state_dict(*from, {.full_state_dict = true});
    EXPECT_EQ(values["weight"].scalar_type(), at::kByte);
    set_model_state_dict(*to, values, {.full_state_dict = true});
    EXPECT_TRUE(member_of(to).equal(member_of(from)));
  });
}

}  // namespace
}  // namespace fsdp::testing
