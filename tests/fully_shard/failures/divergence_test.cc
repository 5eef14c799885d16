// Ranks that do not do the same: real processes, since the transport may end them.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/decoder.h"
#include "tests/support/process_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

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

// Every rank ends by an exception that names what both issued, and by no signal. Rank i
// issued what `issued[i]` says.
void expect_named_on_every_rank(const std::string& child, const std::vector<std::string>& issued) {
  const auto ends = run_processes(child, 2, std::chrono::seconds(40));
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const auto& end = ends[rank];
    const auto other = 1 - rank;
    EXPECT_FALSE(end.killed_at_deadline) << end.output;
    EXPECT_EQ(end.exit_code, 1) << end.output;
    EXPECT_THAT(end.output, HasSubstr("out of order"));
    EXPECT_THAT(end.output, HasSubstr(c10::str("rank ", rank, " issued the ", issued[rank])));
    EXPECT_THAT(end.output, HasSubstr(c10::str("rank ", other, " issued the ", issued[other])));
  }
}

TEST(Divergence, ARankThatSkipsAUnitIsAnErrorOnEveryRankThatNamesBothUnits) {
  expect_named_on_every_rank("skips_a_unit",
                             {"all-gather of unit 'block1'", "all-gather of unit 'block0'"});
}

TEST(Divergence, UnequalUnitsInOppositeOrderAreAnErrorOnEveryRankThatNamesBothUnits) {
  expect_named_on_every_rank("touches_unequal_units_in_opposite_order",
                             {"all-gather of unit 'head'", "all-gather of unit 'block0'"});
}

}  // namespace
}  // namespace fsdp::testing
