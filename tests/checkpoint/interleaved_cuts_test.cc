// Tensors that are cut in blocks, such as packed matrices: a rank has several boxes.
#include "checkpoint/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/saved_layout.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::checkpoint::Manifest;
using internal::checkpoint::placement_from;
using internal::checkpoint::placement_text;
using ::testing::HasSubstr;
using Cuts = std::vector<Placement>;

Cuts cut(const Placement& first, const Placement& second) { return {first, second}; }

// Of [12, 20] over 2 x 2 ranks.
std::vector<Cuts> cuts_of_four_ranks() {
  const Shard rows{.dim = 0, .outer = 3, .unit = 2}, columns{.dim = 1, .outer = 4};
  const Placement ragged = RaggedShard{.dim = 0, .local_units = {1, 3}};
  return {cut(rows, Shard{0}),    cut(rows, Shard{1}),     cut(columns, Shard{1}),
          cut(columns, rows),     cut(Replicate{}, rows),  cut(columns, Replicate{}),
          cut(Shard{0}, columns), cut(Shard{0}, Shard{1}), cut(ragged, Shard{0}),
          cut(Shard{1}, ragged),  cut(Owned{1}, Owned{0}), cut(Replicate{}, Owned{1})};
}

// Other values of the shape and strides.
at::Tensor other_values(const at::Tensor& values) { return values.mul(0).sub(1); }

void save_cut(const at::Tensor& values, const Cuts& cuts, const std::string& path) {
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    save({.tensors = {{"packed", distribute_tensor(values, mesh, cuts)}}}, path);
  });
}

void expect_loads_cut(const at::Tensor& values, const Cuts& cuts, const DeviceMesh& mesh,
                      const std::string& path) {
  for (const auto dtype : {values.scalar_type(), at::kDouble}) {
    const at::Tensor target = distribute_tensor(other_values(values).to(dtype), mesh, cuts);
    load({.tensors = {{"packed", target}}}, path);
    EXPECT_TRUE(full_value(target).equal(values.to(dtype)))
        << cuts[0] << " " << cuts[1] << " " << dtype;
  }
}

TEST(CutsInBlocks, LoadIntoEveryOtherCutIntoAnyStridesAndWiderNumbers) {
  const at::Tensor rows = at::arange(240, at::kFloat).view({12, 20});
  const at::Tensor columns = at::arange(240, at::kFloat).view({20, 12}).t();
  for (const at::Tensor& values : {rows, columns}) {
    for (const Cuts& saved : cuts_of_four_ranks()) {
      SCOPED_TRACE(to_string(saved[0]) + " " + to_string(saved[1]));
      const TemporaryFolder folder(memory_folder());
      save_cut(values, saved, folder / "step");
      verify_checkpoint(folder / "step");
      run_ranks(4, [&](int64_t) {
        const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
        for (const Cuts& cuts : cuts_of_four_ranks())
          expect_loads_cut(values, cuts, mesh, folder / "step");
      });
      at::Tensor plain = other_values(values);
      load({.tensors = {{"packed", plain}}}, folder / "step");
      EXPECT_TRUE(plain.equal(values));
      // What another process that knows nothing of the manifest would read.
      plain.zero_();
      load({.tensors = {{"packed", plain}}}, folder / "step/tensors");
      EXPECT_TRUE(plain.equal(values));
    }
  }
}

int64_t bytes_below(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() == ".safetensors") bytes += static_cast<int64_t>(file.file_size());
  }
  return bytes;
}

TEST(CutsInBlocks, AreWrittenOnceWhereThereAreCopies) {
  const TemporaryFolder folder(memory_folder());
  const at::Tensor values = at::ones({1200, 64}, at::kFloat);
  const Shard packed{.dim = 0, .outer = 3};
  save_cut(values, {packed, Replicate{}}, folder / "copies");
  save_cut(values, {packed, Shard{0}}, folder / "cut");
  const auto all = static_cast<int64_t>(values.nbytes());
  for (const char* name : {"copies", "cut"}) {
    EXPECT_GE(bytes_below(folder / name + "/tensors"), all) << name;
    EXPECT_LE(bytes_below(folder / name + "/tensors"), all + all / 10) << name;
  }
}

TEST(CutsInBlocks, TextsOfPlacementsReadAsTheyWereWritten) {
  for (const Shard& cut : {Shard{1}, Shard{0, 3, 1}, Shard{2, 1, 8}, Shard{0, 12, 34}})
    EXPECT_EQ(placement_from(placement_text(cut)), Placement(cut));
  EXPECT_EQ(placement_text(Shard{0, 3, 8}), "S(0, outer=3, unit=8)");
  const Placement ragged = RaggedShard{.dim = 1, .local_units = {3, 0, 12}};
  EXPECT_EQ(placement_text(ragged), "S(1, local_units=[1, 0, 4])");
  for (const Placement& cut : {ragged, Placement(Owned{2}), Placement(Owned{0})})
    EXPECT_EQ(placement_from(placement_text(cut)), cut);
  for (const char* text :
       {"S(0, outer=0)", "S(0, outer=-3)", "S(0, outer=1)", "S(0, outer=)", "S(0, unit=8, outer=3)",
        "S(0, outer=3", "S(0, outer=3)) ", "S(0, local_units=[])", "S(0, local_units=[2, 4])",
        "S(0, local_units=[1 2])", "S(0, local_units=[1, 2"}) {
    EXPECT_THAT(message_of([&] { placement_from(text); }), HasSubstr("unknown placement")) << text;
  }
}

TEST(CutsInBlocks, AManifestWhoseBlocksDoNotFitIsRefused) {
  const auto parsed = [](const Cuts& cuts) {
    Manifest manifest;
    manifest.world_size = 4;
    manifest.layouts.push_back({{2, 2}, {}, {0, 1, 2, 3}, cuts});
    auto& item = manifest.items["tensors"];
    item.kind = "tensors";
    item.tensors["packed"] = {.dtype = at::kFloat, .shape = {12, 20}, .layout = 0};
    return internal::checkpoint::parse_manifest(format_manifest(manifest), "here");
  };
  for (const Cuts& cuts : cuts_of_four_ranks())
    EXPECT_TRUE(parsed(cuts).ok()) << parsed(cuts).status();
  const Shard fits{.dim = 0, .outer = 3, .unit = 2};
  for (const Cuts& cuts :
       {cut(Shard{.dim = 0, .outer = 5}, Replicate{}),
        cut(Shard{.dim = 0, .outer = 4, .unit = 2}, Replicate{}),
        cut(Shard{.dim = 0, .outer = 24}, Replicate{}), cut(Shard{0}, fits), cut(fits, fits),
        cut(RaggedShard{0, {2, 3}}, Shard{0}), cut(RaggedShard{0, {1, 2, 3}}, Shard{0}),
        cut(Shard{0}, RaggedShard{0, {1, 2}}), cut(Owned{2}, Shard{0}),
        cut(RaggedShard{0, {-1, 2}}, Shard{0}), cut(RaggedShard{0, {0, 0}}, Shard{0})}) {
    EXPECT_THAT(parsed(cuts).status().ToString(), HasSubstr("in blocks or units that do not fit"))
        << cuts[0] << " " << cuts[1];
  }
}

}  // namespace
}  // namespace fsdp::testing
