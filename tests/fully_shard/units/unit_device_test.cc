// Parameters on another device than their mesh, before and after fully_shard. The meta
// device stands for another one here; tests/on_gpu has the real ones.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <ATen/ops/from_blob.h>
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OtherDevice : public Worlds {};

torch::Tensor step(torch::nn::Linear& layer) {
  layer->zero_grad();
  layer(torch::ones({1, 4})).sum().backward();
  return full_gradient(layer->parameters()[0]);
}

TEST_P(OtherDevice, MovingAShardedModuleIsRefusedByNameAndItTrainsOn) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    const auto before = full_value(layer->parameters()[0]);
    const auto entry = layer->parameters()[0];
    EXPECT_THAT(message_of([&] { layer->to(torch::kMeta); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("meta"), HasSubstr("cpu")));
    EXPECT_TRUE(layer->parameters()[0].is_same(entry));
    EXPECT_TRUE(layer->weight.is_cpu());
    EXPECT_TRUE(torch::equal(full_value(entry), before));
    EXPECT_TRUE(torch::equal(step(layer), torch::ones({4, 4})));
  });
}

TEST_P(OtherDevice, OfDataForAMemberIsRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    expect_error<c10::Error>(
        [&] {
          layer->weight.set_data(torch::empty({4, 4}, torch::kMeta));
        },
        HasSubstr("'weight'"));
    EXPECT_TRUE(torch::equal(step(layer), torch::ones({4, 4})));
  });
}

TEST_P(OtherDevice, WhatIsOnTheMeshsDeviceIsNotMoved) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::BatchNorm1d norm(4);
    std::vector<std::pair<torch::Tensor, const void*>> before;
    for (const auto& buffer : norm->buffers()) before.emplace_back(buffer, buffer.const_data_ptr());
    fully_shard(norm, mesh);
    const auto after = norm->buffers();
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(after[i].is_same(before[i].first));
      EXPECT_EQ(after[i].const_data_ptr(), before[i].second);
    }
    EXPECT_TRUE(DTensor(norm->parameters()[0]).to_local().is_cpu());
  });
}

TEST_P(OtherDevice, AParameterOfTheMetaDeviceBesideOthersIsRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Linear layer(4, 4);
    layer->register_parameter("late", torch::empty({3, 4}, torch::kMeta));
    expect_error<c10::ValueError>([&] { fully_shard(layer, mesh); },
                                  AllOf(HasSubstr("'late'"), HasSubstr("meta"),
                                        HasSubstr("'weight'"), HasSubstr("one device")));
    EXPECT_FALSE(is_fsdp_module(*layer));
    for (const auto& parameter : layer->parameters()) EXPECT_FALSE(is_dtensor(parameter));
  });
}

// A CPU tensor may carry the index 0 or none: two devices as far as the library can see.
TEST_P(OtherDevice, OneUnitsParametersOnTwoIndicesAreRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    std::vector<float> memory(16, 0.5F);
    const auto indexed =
        at::for_blob(memory.data(), {4, 4}).target_device(at::Device(at::kCPU, 0)).make_tensor();
    ASSERT_NE(indexed.device(), torch::ones({1}).device());
    torch::nn::Linear layer = make_linear(4, 4);
    layer->register_parameter("elsewhere", indexed);
    expect_error<c10::ValueError>([&] { fully_shard(layer, mesh); },
                                  AllOf(HasSubstr("'elsewhere'"), HasSubstr("cpu:0"),
                                        HasSubstr("'weight'"), HasSubstr("one device")));
    EXPECT_FALSE(is_fsdp_module(*layer));
    for (const auto& parameter : layer->parameters()) EXPECT_FALSE(is_dtensor(parameter));
  });
}

TEST_P(OtherDevice, ToAnotherDtypeWhileUnshardedByHandIsAsWhileSharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    const auto expected = full_value(layer->parameters()[0]).to(torch::kDouble);
    get_fsdp_module(*layer).unshard();
    layer->to(torch::kDouble);
    EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]), expected));
    EXPECT_TRUE(torch::equal(layer->weight.detach().clone(), expected));
    layer(torch::ones({1, 4}, torch::kDouble)).sum().backward();
    EXPECT_EQ(full_gradient(layer->parameters()[0]).scalar_type(), torch::kDouble);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

INSTANTIATE_WORLDS(OtherDevice, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
