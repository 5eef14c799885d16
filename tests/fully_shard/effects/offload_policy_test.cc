// Offloading on a CPU mesh: the parameters are where they should be already.
#include "tests/fully_shard/effects/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

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

}  // namespace
}  // namespace fsdp::testing
