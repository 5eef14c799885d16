// Profilers see FSDP's ranges by name, here without their bytes: fsdp::all_gather(unit),
// fsdp::all_gather_copy_out(unit), fsdp::reduce_scatter(unit), fsdp::forward(unit).
#include "fully_shard/forward.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using Counts = std::map<std::string, int>;

// Counts this thread's ranges of FSDP while it lives, and how many of them are open.
class Ranges {
 public:
  Ranges() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end))) {
    counts = {};
    begun = {};
  }
  ~Ranges() { at::removeCallback(handle_); }
  Ranges(const Ranges&) = delete;
  Counts take() { return std::exchange(counts, {}); }

  static thread_local Counts counts;
  static thread_local std::vector<std::string> begun;  // in order
  static thread_local int open;

 private:
  // Those that profile_test.cc adds up are left out.
  static bool is_ours(const at::RecordFunction& call) {
    const std::string_view name = call.name();
    const auto is_of = [name](std::string_view what) { return name.starts_with(what); };
    return is_of("fsdp::") && !is_of("fsdp::wait(") && !is_of("fsdp::prefetch(") &&
           !is_of("fsdp::reshard(");
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    if (!is_ours(call)) return nullptr;
    const std::string name = call.name();
    begun.push_back(name.substr(0, name.rfind(')') + 1));
    ++counts[begun.back()];
    ++open;
    return nullptr;
  }
  static void end(const at::RecordFunction& call, at::ObserverContext*) {
    if (is_ours(call)) --open;
  }
  at::CallbackHandle handle_;
};
thread_local Counts Ranges::counts;
thread_local std::vector<std::string> Ranges::begun;
thread_local int Ranges::open = 0;

void step(const Model& model) {
  for (auto& parameter : model.module->parameters()) parameter.mutable_grad().reset();
  model.loss(make_data(1)).backward();
}

TEST(ProfilerRanges, OfAForwardHoldThoseOfItsGathersInTheirOrder) {
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const Ranges ranges;
    forward(model, torch::ones({2, 4}));
    EXPECT_THAT(Ranges::begun, ::testing::ElementsAre(
                                   "fsdp::forward((root))", "fsdp::all_gather(first)",
                                   "fsdp::all_gather_copy_out(first)", "fsdp::all_gather(second)",
                                   "fsdp::all_gather_copy_out(second)"));
    EXPECT_EQ(Ranges::open, 0);
  });
}

// The head's gradients come first in backward, where it stays from forward; so do the
// root's.
TEST(ProfilerRanges, NameEveryCollectiveOfEveryUnitOfATrainingStep) {
  for (const int64_t world : {2, 3}) {
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      const auto model = build_seeded([] { return decoder_model(4, 2); });
      shard_decoder(*model.module, mesh);
      Ranges ranges;
      for (int i = 0; i < 3; ++i) {
        const auto before = counters(mesh);
        step(model);
        Counts expected;
        for (const auto* unit : {"embedding", "block0", "block1", "head", "(root)"}) {
          const std::string name = "(" + std::string(unit) + ")";
          const bool again =
              std::string_view(unit).starts_with("block");  // gathered anew for backward
          expected["fsdp::all_gather" + name] = expected["fsdp::all_gather_copy_out" + name] =
              again ? 2 : 1;
          expected["fsdp::reduce_scatter" + name] = 1;
        }
        EXPECT_EQ(ranges.take(), expected) << "step " << i;
        EXPECT_EQ(Ranges::open, 0);
        EXPECT_EQ(counters(mesh).all_gathers - before.all_gathers, 7);
        EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, 5);
      }
    });
  }
}

TEST(ProfilerRanges, OfHybridShardingReduceOverTheShardsBeforeTheReplicas) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    const auto model = build_seeded([] { return decoder_model(4, 2); });
    shard_decoder(*model.module, mesh);
    const Ranges ranges;
    step(model);
    for (const auto* unit : {"embedding", "block0", "block1", "head", "(root)"}) {
      const auto position = [&](const std::string& what) {
        const auto found = std::find(Ranges::begun.begin(), Ranges::begun.end(),
                                     what + "(" + std::string(unit) + ")");
        EXPECT_NE(found, Ranges::begun.end()) << what << " of " << unit;
        return found - Ranges::begun.begin();
      };
      EXPECT_LT(position("fsdp::reduce_scatter"), position("fsdp::all_reduce")) << unit;
    }
  });
}

TEST(ProfilerRanges, AWorldOfOneHasNone) {
  on_ranks_of(1, [](const DeviceMesh& mesh) {
    const auto model = build_seeded([] { return decoder_model(4, 2); });
    shard_decoder(*model.module, mesh);
    Ranges ranges;
    step(model);
    EXPECT_EQ(ranges.take(), Counts{});
  });
}

}  // namespace
}  // namespace fsdp::testing
