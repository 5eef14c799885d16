// What each combination of a mesh, a resharding policy, a kind of parameters and a way to
// accumulate sends and holds: exactly the collectives and bytes that the policies ask
// for, within the memory formula, at depth 4 and, before a landing, 12; at night 32.
#include "device_mesh/peer_memory/peer_memory.h"
#include "tests/fully_shard/resharding/expected_traffic.h"
#include "tests/fully_shard/resharding/policies.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int64_t kShallow = 4;
int64_t many_blocks() { return is_night() ? 32 : 12; }

void append_sizes(const torch::nn::Module& module, UnitSize& unit) {
  for (const auto& item : module.named_parameters()) {
    const auto& parameter = item.value();
    unit.push_back({.rows = parameter.size(0),
                    .columns = parameter.numel() / parameter.size(0),
                    .is_trainable = parameter.requires_grad(),
                    .is_used = item.key().rfind("unused.", 0) != 0});
  }
}

// Of a model that is not sharded.
ChainSize size_of(const VariedModel& model) {
  ChainSize chain;
  append_sizes(*model->embedding, chain.root);
  const bool is_tied = model->head->weight.is_same(model->embedding->weight);
  if (!is_tied) append_sizes(*model->head, chain.root);
  for (const auto& block : model->blocks) append_sizes(*block, chain.blocks.emplace_back());
  return chain;
}

// Peer memory as it is by default, and where ranks are to copy; over Gloo there is none.
std::vector<std::string> settings() {
  if (internal::peer_memory_setting() == internal::PeerMemorySetting::kOff) return {"off"};
  return {"on", "copy"};
}

ChainPolicy chain_policy_of(const Policies& policies, Accumulation accumulation,
                            const std::string& setting) {
  const auto& reshard = *policies.reshard;
  const auto kept = reshard.reshards() ? Keeps::kNothing : Keeps::kAll;
  return {.shards = policies.shards(),
          .replicas = policies.ranks() / policies.shards(),
          .keeps = reshard.world() ? Keeps::kPart : kept,
          .neighbours = policies.neighbours(),
          .accumulation = accumulation,
          .shows = setting == "on" && !policies.is_hybrid() ? Shows::kShards : Shows::kCopies};
}

StepTraffic between(const Counters& before, const Counters& after) {
  return {after.all_gathers - before.all_gathers,
          after.prefetched_all_gathers - before.prefetched_all_gathers,
          after.all_gather_bytes - before.all_gather_bytes,
          after.reduce_scatters - before.reduce_scatters,
          after.reduce_scatter_bytes - before.reduce_scatter_bytes,
          after.all_reduces - before.all_reduces};
}

class PolicyTraffic : public ::testing::TestWithParam<Policies> {
 protected:
  struct Held {
    int64_t peak = 0, expected_kept = 0;
  };

  // Trains until steps repeat, looks at one step of each kind of accumulation, and says
  // what it held.
  std::map<Accumulation, Held> held_by_steps(const std::string& setting, Parameters kind,
                                             int64_t depth, int64_t rank,
                                             const DeviceMesh& mesh) const {
    VariedModel model(kind, depth);
    const auto chain = size_of(model);
    shard(model, mesh, GetParam());
    torch::optim::SGD optimizer(model->parameters(), /*lr=*/1e-6);
    for (int warm_up = 0; warm_up < 2; ++warm_up) step(model, optimizer, Accumulation::kOff, rank);

    std::map<Accumulation, Held> held;
    for (const auto accumulation : kAllAccumulations) {
      SCOPED_TRACE("depth " + std::to_string(depth) + ", accumulation " +
                   std::to_string(static_cast<int>(accumulation)));
      const auto policy = chain_policy_of(GetParam(), accumulation, setting);
      reset_peak(mesh);
      const auto before = counters(mesh);
      step(model, optimizer, accumulation, rank);
      const auto after = counters(mesh);
      EXPECT_EQ(between(before, after), expected_traffic(chain, policy));
      EXPECT_LE(after.peak_bytes, expected_peak_bytes(chain, policy));
      held[accumulation] = {after.peak_bytes, expected_kept_bytes(chain, policy)};
    }
    return held;
  }

  // Whether a step of four blocks has as much on its way at a time as one of many. A unit
  // that misses gradients leaves two units later, and only then goes to the replicas.
  bool four_are_enough(Parameters kind) const {
    return kind != Parameters::kUnused || !GetParam().is_hybrid();
  }

  static void expect_grows_by_what_is_kept(std::map<Accumulation, Held>& shallow,
                                           std::map<Accumulation, Held>& deep) {
    for (const auto accumulation : kAllAccumulations) {
      EXPECT_EQ(deep[accumulation].peak - shallow[accumulation].peak,
                deep[accumulation].expected_kept - shallow[accumulation].expected_kept)
          << "accumulation " << static_cast<int>(accumulation);
    }
  }

 private:
  static void step(VariedModel& model, torch::optim::SGD& optimizer, Accumulation accumulation,
                   int64_t rank) {
    const auto count = micro_batches(accumulation);
    for (int64_t micro = 0; micro < count; ++micro)
      run_micro_batch(model, tokens_of(model, 0, micro, rank), accumulation, micro + 1 == count);
    optimizer.step();
    optimizer.zero_grad();
  }
};

TEST_P(PolicyTraffic, OfAStepIsWhatThePoliciesSayAndItsMemoryGrowsWithDepthByWhatTheyKeep) {
  for (const auto& setting : settings()) {
    const WithEnvironment set("FSDP_PEER_MEMORY", setting);
    for (const auto kind : kAllParameters) {
      run_ranks(GetParam().ranks(), [&](int64_t rank) {
        SCOPED_TRACE(setting + ", parameters " + std::to_string(static_cast<int>(kind)));
        const auto mesh = mesh_of(GetParam());
        auto shallow = held_by_steps(setting, kind, kShallow, rank, mesh);
        auto deep = held_by_steps(setting, kind, many_blocks(), rank, mesh);
        if (rank == 0 && four_are_enough(kind)) expect_grows_by_what_is_kept(shallow, deep);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PolicyTraffic, ::testing::ValuesIn(all_policies()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace fsdp::testing
