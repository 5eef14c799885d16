// What a device may do at the same time: a gather and the computation of the unit before
// it, a reduction and the computation of the units after it in backward.
#include "fully_shard/fully_shard.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/default_generator.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using simulated::RecordedItem;
using Items = std::vector<RecordedItem>;

constexpr size_t kLayers = 4;
constexpr char kMarker[] = "aten::erfinv";  // which no layer uses

void train(int64_t) {
  const auto mesh = init_device_mesh(simulated::kDeviceType, {2});
  auto model = drawn_from_seed(1, [] {
    torch::nn::Sequential layers;
    for (size_t i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(8, 8));
    return layers;
  });
  for (const auto& layer : model->children()) fully_shard(*layer, mesh);
  fully_shard(model, mesh);
  const auto x = torch::ones({3, 8}).to(local_device(mesh));
  for (int step = 0; step < 2; ++step) {
    if (step == 1) torch::erfinv(x);
    model->forward(x).sum().backward();
  }
}

// Of the second step, whose units gather ahead, on the first rank's device.
Items items_of_a_step() {
  simulated::install();
  auto report = simulated::run_in(
      {.schedule = simulated::kLate, .items = simulated::Settings::Items::kRecorded},
      [] { simulated::run_ranks_on_devices(2, std::make_shared<simulated::World>(), train); });
  Items items;
  std::copy_if(report.items.begin(), report.items.end(), std::back_inserter(items),
               [](const auto& item) { return item.device == 0; });
  const auto marker = std::find_if(items.begin(), items.end(),
                                   [](const auto& item) { return item.name.operation == kMarker; });
  items.erase(items.begin(), marker);
  return items;
}

Items named(const Items& items, const std::string& end) {
  Items found;
  std::copy_if(items.begin(), items.end(), std::back_inserter(found),
               [&](const auto& item) { return item.name.operation.ends_with(end); });
  return found;
}

bool overlaps_any(const RecordedItem& item, const Items& others) {
  return std::any_of(others.begin(), others.end(),
                     [&](const auto& other) { return item.may_overlap(other); });
}

TEST(Overlap, OfEachGatherWithTheComputationBeforeIt) {
  const auto items = items_of_a_step();
  const auto gathers = named(items, " all-gather"), layers = named(items, "aten::addmm");
  ASSERT_EQ(layers.size(), kLayers);
  // The last layer's parameters stay for backward, which does not read the first layer's.
  ASSERT_EQ(gathers.size(), 2 * kLayers - 2);
  for (size_t i = 1; i < kLayers; ++i) {
    EXPECT_TRUE(gathers[i].may_overlap(layers[i - 1])) << i;
    EXPECT_FALSE(gathers[i].may_overlap(layers[i])) << i;
  }
  const auto backward = named(items, "aten::mm");
  for (size_t i = kLayers; i < gathers.size(); ++i)
    EXPECT_TRUE(overlaps_any(gathers[i], backward)) << i;
}

TEST(Overlap, OfEachReductionButTheLastWithTheComputationAfterIt) {
  const auto items = items_of_a_step();
  const auto reductions = named(items, " reduce-scatter"), backward = named(items, "aten::mm");
  ASSERT_EQ(reductions.size(), kLayers);
  for (size_t i = 0; i + 1 < kLayers; ++i) EXPECT_TRUE(overlaps_any(reductions[i], backward)) << i;
}

}  // namespace
}  // namespace fsdp::testing
