// Offloading: on a CPU mesh the parameters are where they should be already. The test
// mode that offloads from there too shows everything but the copies between two devices,
// which tests/on_gpu/one_rank_test.cc has.
#include "fully_shard/params/shard_buffer.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/default_generator.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <mutex>

namespace fsdp::testing {
namespace {

using internal::location_of_shards;
using internal::ShardLocation;

class OffloadPolicyOnCpu : public Worlds {};

TEST_P(OffloadPolicyOnCpu, GivesTheSameNumbersAndTraffic) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto trained = [&](const OffloadPolicy& policy) {
      auto linear = make_linear(3, 4);
      fully_shard(linear, mesh, {.offload_policy = policy});
      torch::optim::AdamW optimizer(linear->parameters(), 0.1);
      const auto sent = traffic_of(mesh, [&] {
        linear(torch::full({2, 3}, rank + 1.0)).pow(2).sum().backward();
        optimizer.step();
      });
      return std::pair(full_value(linear->parameters()[0]), sent.all_gather_bytes);
    };
    const auto plain = trained({});
    const auto offloaded = trained({.offload_to_cpu = true, .pin_memory = true});
    EXPECT_TRUE(plain.first.equal(offloaded.first));
    EXPECT_EQ(plain.second, offloaded.second);
  });
}

INSTANTIATE_WORLDS(OffloadPolicyOnCpu, 1, 2);

TEST(HomeOfShards, IsTheHostWhereMembersAreOnADeviceAndThePolicySaysSo) {
  for (const auto device : {c10::kCUDA, c10::kXPU, c10::kPrivateUse1}) {
    EXPECT_EQ(location_of_shards({}, device), ShardLocation::kWithMembers);
    EXPECT_EQ(location_of_shards({.offload_to_cpu = true}, device), ShardLocation::kPinnedHost);
    EXPECT_EQ(location_of_shards({.offload_to_cpu = true, .pin_memory = false}, device),
              ShardLocation::kHost);
  }
  EXPECT_EQ(location_of_shards({.offload_to_cpu = true}, c10::kCPU), ShardLocation::kWithMembers);
}

class Offloaded : public Worlds {
 protected:
  Offloaded() { internal::set_offloads_from_cpu(true); }
  ~Offloaded() override { internal::set_offloads_from_cpu(false); }

  static torch::nn::Linear make_layer(const DeviceMesh& mesh) {
    auto layer = make_linear(3, 5);
    fully_shard(layer, mesh, {.offload_policy = {.offload_to_cpu = true}});
    return layer;
  }
};

TEST_P(Offloaded, UnitsTrainAsThePlainModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = make_linear(3, 5), layer = make_layer(mesh);
    const auto adamw = torch::optim::AdamWOptions(0.1).eps(1e-3);  // what is rounded stays small
    torch::optim::AdamW of_plain(plain->parameters(), adamw), optimizer(layer->parameters(), adamw);
    for (int step = 0; step < 3; ++step) {
      const auto x = torch::full({2, 3}, step + 1.0);
      of_plain.zero_grad();
      optimizer.zero_grad();
      plain(x).pow(2).sum().backward();
      layer(x).pow(2).sum().backward();
      of_plain.step();
      optimizer.step();
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(
          torch::allclose(full_value(layer->parameters()[i]), plain->parameters()[i], 1e-5, 1e-6));
    }
  });
}

// At world 1 too, where members that are at home with their shards borrow these.
TEST_P(Offloaded, MembersHaveMemoryOfTheirOwnAndItGoes) {
  on_ranks([this](int64_t, const DeviceMesh& mesh) {
    auto layer = make_layer(mesh);
    const auto shards = counters(mesh).sharded_bytes;
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    {
      const Unsharded unsharded(layer->weight);
      EXPECT_EQ(resident_bytes(counters(mesh)), world() * shards);
      EXPECT_NE(layer->weight.const_data_ptr(),
                DTensor(layer->parameters()[0]).to_local().const_data_ptr());
    }
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0) << "the row went when the gather was over";
    EXPECT_EQ(counters(mesh).sharded_bytes, shards);
  });
}

TEST_P(Offloaded, WhatTravelsIsACopyOfTheShards) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY",
                                  "off");  // else shards are read where they lie
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto bytes_of_a_gather = [&](bool offload) {
      auto layer = make_linear(3, 5);
      auto unit = fully_shard(layer, mesh, {.offload_policy = {.offload_to_cpu = offload}});
      auto gather = unit.unshard_async();
      const auto staging = counters(mesh).staging_bytes;
      gather.wait();
      return std::pair(staging, counters(mesh).sharded_bytes);
    };
    const auto [at_home, shards] = bytes_of_a_gather(false);
    const auto offloaded = bytes_of_a_gather(true).first;
    EXPECT_EQ(offloaded - at_home, shards);
  });
}

TEST_P(Offloaded, GradientsOfTwoBackwardsAddUp) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_layer(mesh);
    for (int i = 0; i < 2; ++i) layer(torch::ones({2, 3})).sum().backward();
    EXPECT_TRUE(full_gradient(layer->parameters()[0]).equal(torch::full({5, 3}, 4.0)));
    EXPECT_TRUE(full_gradient(layer->parameters()[1]).equal(torch::full({5}, 4.0)));
  });
}

TEST_P(Offloaded, WritesReachTheOtherSide) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_layer(mesh);
    const torch::NoGradGuard no_grad;
    layer->weight.fill_(3);
    EXPECT_TRUE(full_value(layer->parameters()[0]).equal(torch::full({5, 3}, 3.0)));
    layer->parameters()[0].mul_(2);
    EXPECT_TRUE(layer->weight.equal(torch::full({5, 3}, 6.0)));
  });
}

TEST_P(Offloaded, ToAnotherDtypeTrainsOn) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_layer(mesh);
    layer(torch::ones({2, 3}));
    layer->to(torch::kDouble);
    layer(torch::ones({2, 3}, torch::kDouble)).sum().backward();
    EXPECT_TRUE(full_gradient(layer->parameters()[1]).equal(torch::full({5}, 2.0, torch::kDouble)));
    EXPECT_TRUE(
        full_value(layer->parameters()[0]).allclose(make_linear(3, 5)->weight.to(torch::kDouble)));
  });
}

TEST_P(Offloaded, DeferredUnitsGetTheirValues) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = [] {
      const std::lock_guard lock(default_generator_in_use);
      return deferred_init([] { return make_linear(3, 5); });
    }();
    fully_shard(layer, mesh, {.offload_policy = {.offload_to_cpu = true}});
    {
      const std::lock_guard lock(default_generator_in_use);
      materialize(*layer);
    }
    const auto x = torch::ones({2, 3});
    EXPECT_TRUE(layer->forward(x).equal(make_linear(3, 5)->forward(x)));
  });
}

INSTANTIATE_WORLDS(Offloaded, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
