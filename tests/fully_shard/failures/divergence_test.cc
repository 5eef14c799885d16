// Ranks that do not do the same: real processes, since the transport may end them.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/decoder.h"
#include "tests/support/process_ranks.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

DecoderImpl& decoder_of(Model& model) { return dynamic_cast<DecoderImpl&>(*model.module); }

Model start_rank() {
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(5)});
  torch::manual_seed(1);
  auto model = decoder_model(4, 3);
  shard_decoder(*model.module, init_device_mesh(torch::kCPU, {2}));
  return model;
}

const ChildCase kSkipsAUnit("skips_a_unit", [] {
  auto model = start_rank();
  auto& decoder = decoder_of(model);
  auto x = decoder.embedding(make_data(1).index);
  for (int64_t i = 0; i < 3; ++i) {
    if (i == 1 && default_mesh().rank() == 1) continue;
    x = decoder.blocks[static_cast<size_t>(i)](x);
  }
  decoder.head(decoder.norm(x)).sum().backward();
  return 0;
});

const ChildCase kTouchesUnequalUnitsInOppositeOrder("touches_unequal_units_in_opposite_order", [] {
  auto model = start_rank();
  auto& decoder = decoder_of(model);
  torch::NoGradGuard no_grad;
  if (default_mesh().rank() == 0) {
    decoder.head->weight.sum();
    decoder.blocks[0]->up->weight.sum();
  } else {
    decoder.blocks[0]->up->weight.sum();
    decoder.head->weight.sum();
  }
  return 0;
});

TEST(Divergence, ARankThatSkipsAUnitIsAnErrorOnEveryRankWithinTheTimeout) {
  const auto ends = run_processes("skips_a_unit", 2, std::chrono::seconds(40));
  for (const auto& end : ends) {
    EXPECT_FALSE(end.killed_at_deadline) << end.output;
    EXPECT_NE(end.exit_code, 0) << end.output;
    EXPECT_NE(end.output.find("unit '"), std::string::npos) << end.output;
  }
}

TEST(Divergence, UnequalUnitsInOppositeOrderEndEveryRankWithTheLastOperationNamed) {
  const auto ends =
      run_processes("touches_unequal_units_in_opposite_order", 2, std::chrono::seconds(40));
  for (const auto& end : ends) {
    EXPECT_FALSE(end.killed_at_deadline) << end.output;
    EXPECT_NE(end.exit_code, 0) << end.output;
    EXPECT_NE(end.output.find("all-gather of unit '"), std::string::npos) << end.output;
  }
}

}  // namespace
}  // namespace fsdp::testing
