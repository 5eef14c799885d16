// Saving and loading the shards of a model.
#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

int64_t data_bytes(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    bytes += static_cast<int64_t>(entry.file_size() - sizeof(header) - header);
  }
  return bytes;
}

void save_small(const std::string& path, int64_t world, int64_t seed, SaveOptions options = {}) {
  run_ranks(world, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, seed);
    save({.model = model}, path, options);
  });
}

void expect_small(const std::string& path, int64_t world, int64_t seed) {
  run_ranks(world, [&](int64_t rank) {
    SmallModel model, expected;
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, seed + 5);
    fill(*expected, seed);
    const auto loaded = load({.model = model}, path);
    EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
    const auto want = full_values(*expected);
    for (const auto& item : full_values(*model)) {
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << rank << " " << item.key();
    }
  });
}

TEST(ShardedCheckpoint, EveryWorldLoadsWhatEveryOtherSaved) {
  for (int64_t from = 1; from <= 4; ++from) {
    TemporaryFolder folder;
    save_small(folder / "saved", from, from);
    for (int64_t to = 1; to <= 4; ++to) {
      SCOPED_TRACE(std::to_string(from) + " -> " + std::to_string(to));
      expect_small(folder / "saved", to, from);
    }
  }
}

TEST(ShardedCheckpoint, TheModelSeesLoadedValuesWhereItWasUnsharded) {
  TemporaryFolder folder;
  save_small(folder / "saved", 2, 1);
  run_ranks(2, [&](int64_t) {
    SmallModel model, plain;
    model->eval(), plain->eval();
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 3);
    fill(*plain, 1);
    const auto x = torch::ones({2, 5});
    model->forward(x);  // leaves units unsharded, or gathered ahead
    load({.model = model}, folder / "saved");
    EXPECT_TRUE(torch::equal(model->forward(x), plain->forward(x)));
  });
}

TEST(ShardedCheckpoint, AModelShardedByColumnsLoadsIntoOneShardedByRowsAndBack) {
  const auto by_columns = [](const std::string&, const at::Tensor& tensor) {
    return Shard{tensor.dim() - 1};
  };
  TemporaryFolder folder;
  on_ranks_of(3, [&](const DeviceMesh& mesh) {
    SmallModel columns, rows;
    fully_shard(columns, mesh, {.shard_placement_fn = by_columns});
    shard_small_model(rows, mesh);
    fill(*columns, 4);
    fill(*rows, 6);
    save({.model = columns}, folder / "columns");
    save({.model = rows}, folder / "rows");
  });
  expect_small(folder / "columns", 2, 4);
  run_ranks(4, [&](int64_t) {
    SmallModel model, expected;
    fully_shard(model, init_device_mesh(torch::kCPU, {4}), {.shard_placement_fn = by_columns});
    load({.model = model}, folder / "rows");
    fill(*expected, 6);
    const auto want = full_values(*expected);
    for (const auto& item : full_values(*model))
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  });
}

// Tensors of any mesh and placements, into any other.
struct Case {
  std::vector<int64_t> mesh;
  std::vector<Placement> placements;
};

TEST(ShardedCheckpoint, AnyMeshAndPlacementIntoAnyOther) {
  const std::vector<Case> cases = {{{4}, {Shard{0}}},
                                   {{4}, {Shard{1}}},
                                   {{4}, {Replicate{}}},
                                   {{2, 2}, {Replicate{}, Shard{0}}},
                                   {{2, 2}, {Shard{0}, Shard{1}}},
                                   {{2, 2}, {Shard{0}, Shard{0}}},
                                   {{2, 2}, {Shard{1}, Replicate{}}}};
  const auto make = [](const DeviceMesh& mesh, const Case& each, int64_t add) {
    std::map<std::string, at::Tensor> tensors;
    const auto put = [&](const std::string& name, const at::Tensor& full) {
      tensors.emplace(name, distribute_tensor(full, mesh, each.placements));
    };
    const auto numbers = torch::arange(35, torch::kDouble).view({7, 5}).add(add);
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kLong,
                             torch::kByte, torch::kFloat8_e4m3fn}) {
      put(c10::toString(dtype), numbers.to(dtype));
    }
    put("bool", numbers.to(torch::kLong).remainder(3).eq(0));
    put("nothing", torch::empty({0, 3}));
    put("strided", numbers.t().contiguous().t());
    return tensors;
  };
  TemporaryFolder folder;
  run_ranks(4, [&](int64_t rank) {
    std::vector<DeviceMesh> meshes;
    for (const Case& each : cases) meshes.push_back(init_device_mesh(torch::kCPU, each.mesh));
    for (size_t from = 0; from < cases.size(); ++from) {
      const auto path = folder / std::to_string(from);
      const auto saved = make(meshes[from], cases[from], 1);
      save({.tensors = saved}, path);
      for (size_t to = 0; to < cases.size(); ++to) {
        const auto target = make(meshes[to], cases[to], 50);
        load({.tensors = target}, path);
        const auto want = make(meshes[to], cases[to], 1);
        for (const auto& [name, tensor] : target) {
          const auto got = DTensor(tensor).to_local(), expected = DTensor(want.at(name)).to_local();
          EXPECT_TRUE(torch::equal(got.to(torch::kDouble), expected.to(torch::kDouble)))
              << "rank " << rank << " " << name << " " << from << " -> " << to;
        }
      }
    }
  });
}

TEST(ShardedCheckpoint, NothingIsWrittenTwice) {
  TemporaryFolder folder;
  const auto tied = torch::randn({40, 30});
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    std::map<std::string, at::Tensor> tensors = {{"plain", torch::ones({100})}};
    for (int i = 0; i < 8; ++i) {
      tensors["hsdp" + std::to_string(i)] = distribute_tensor(tied, mesh, {Replicate{}, Shard{0}});
    }
    save({.tensors = tensors}, folder / "saved");
  });
  EXPECT_EQ(data_bytes(folder / "saved"), 8 * 40 * 30 * 4 + 100 * 4);
  // and the copies share the work
  std::vector<uintmax_t> sizes;
  for (const auto& entry : fs::directory_iterator(folder / "saved/tensors")) {
    if (entry.path().extension() == ".safetensors") sizes.push_back(entry.file_size());
  }
  ASSERT_EQ(sizes.size(), 4u);
  EXPECT_LT(*std::max_element(sizes.begin(), sizes.end()),
            1.2 * static_cast<double>(*std::min_element(sizes.begin(), sizes.end())));
}

TEST(ShardedCheckpoint, TiedParametersAreOneTensor) {
  struct Tied : torch::nn::Module {
    Tied() : a(register_parameter("a", torch::randn({4}))) { register_parameter("b", a); }
    at::Tensor a;
  };
  TemporaryFolder folder;
  auto model = std::make_shared<Tied>(), other = std::make_shared<Tied>();
  save({.model = model}, folder / "saved");
  EXPECT_EQ(data_bytes(folder / "saved"), 4 * 4);
  load({.model = other}, folder / "saved");
  EXPECT_TRUE(torch::equal(other->a, model->a));
}

TEST(ShardedCheckpoint, BetweenForwardAndBackwardSavingIsFineAndInsideItIsRefused) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 1);
    model->eval();
    const auto loss = model->forward(torch::ones({4, 5})).sum();
    save({.model = model}, folder / "between");
    std::string text;
    const auto y = loss * 1;
    y.register_hook([&](const torch::Tensor&) {
      text = message_of([&] { save({.model = model}, folder / "inside"); });
    });
    y.backward();
    EXPECT_THAT(text, HasSubstr("inside a backward"));
    EXPECT_TRUE(model->named_parameters()["first.weight"].grad().defined());
  });
  EXPECT_FALSE(fs::exists(folder / "inside"));
  expect_small(folder / "between", 3, 1);
}

TEST(ShardedCheckpoint, ErrorsAreTheSameOnAllRanksAndChangeNothing) {
  TemporaryFolder folder;
  save_small(folder / "saved", 2, 1);
  run_ranks(2, [&](int64_t rank) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 9);
    EXPECT_THAT(message_of([&] { save({.model = model}, folder / "saved"); }),
                HasSubstr("SaveOptions::overwrite"));
    EXPECT_THAT(
        message_of([&] { save({.model = model}, folder / ("rank" + std::to_string(rank))); }),
        HasSubstr("rank 1 gives another path"));
    auto wrong = torch::zeros({3}), extra = torch::zeros({2});
    EXPECT_THAT(message_of([&] {
                  load({.model = model, .tensors = {{"w", wrong}}}, folder / "saved");
                }),
                HasSubstr("has no 'tensors'"));
    EXPECT_THAT(message_of([&] { load({.model = model}, folder / "nowhere"); }),
                HasSubstr("no such checkpoint"));
    torch::nn::Linear other(5, 7);
    const auto text = message_of([&] { load({.model = other}, folder / "saved"); });
    EXPECT_THAT(text, HasSubstr("missing in the file: weight, bias"));
    EXPECT_THAT(text, HasSubstr("in the file only: first.bias, first.weight, frozen"));
    SmallModel expected;
    fill(*expected, 9);
    const auto want = full_values(*expected);
    for (const auto& item : full_values(*model)) {
      EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
    }
  });
}

TEST(ShardedCheckpoint, ShapesAndLossyTypesAreRefusedByName) {
  TemporaryFolder folder;
  const auto half = torch::arange(6).to(torch::kBFloat16);
  save({.tensors = {{"w", half}}}, folder / "half");
  save({.tensors = {{"w", torch::full({6}, 1.0 / 3)}}}, folder / "single");
  auto wide = torch::zeros({6}), narrow = torch::zeros({6}, torch::kBFloat16);
  load({.tensors = {{"w", wide}}}, folder / "half");  // exact
  EXPECT_TRUE(torch::equal(wide, half.to(torch::kFloat)));
  EXPECT_THAT(message_of([&] {
                load({.tensors = {{"w", narrow}}}, folder / "single");
              }),
              HasSubstr("'w' is BFloat16 here and Float in the file"));
  load({.tensors = {{"w", narrow}}}, folder / "single", {.cast = true});
  EXPECT_TRUE(torch::equal(narrow, torch::full({6}, 1.0 / 3).to(torch::kBFloat16)));
  auto longer = torch::zeros({7});
  EXPECT_THAT(message_of([&] {
                load({.tensors = {{"w", longer}}}, folder / "half", {.cast = true});
              }),
              HasSubstr("'w' has shape [7] here and [6] in the file"));
}

}  // namespace
}  // namespace fsdp::testing
