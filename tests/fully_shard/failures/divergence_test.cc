// Ranks that do not do the same, or die: real processes, since the transport may end
// them.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/process_ranks.h"
#include "tests/support/slowdown.h"
#include "tests/support/with_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kGroupTimeout{5};
constexpr char kStartsAt[] = "starts at ms ";

DecoderImpl& decoder_of(Model& model) { return dynamic_cast<DecoderImpl&>(*model.module); }

// Of a clock that all processes of a machine share.
int64_t now_in_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// A model of three blocks, sharded over all ranks.
Model start_rank() {
  init_process_group({.backend = "gloo", .timeout = kGroupTimeout});
  torch::manual_seed(1);
  auto model = decoder_model(4, 3);
  shard_decoder(*model.module, init_device_mesh(torch::kCPU, {launch_environment().world_size}));
  std::fprintf(stderr, "%s%lld\n", kStartsAt, static_cast<long long>(now_in_ms()));
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

const ChildCase kTouchesEqualUnitsInOppositeOrder("touches_equal_units_in_opposite_order", [] {
  auto model = start_rank();
  auto& blocks = decoder_of(model).blocks;
  torch::NoGradGuard no_grad;
  const auto first = static_cast<size_t>(default_mesh().rank());
  blocks[first]->up->weight.sum();
  blocks[1 - first]->up->weight.sum();
  return 0;
});

// Rank 0 comes to a gather when the other comes to a reduction. These have orders of
// their own, so the two never meet: that neither wait can end is found through the store.
const ChildCase kSkipsAForward("skips_a_forward", [] {
  auto model = start_rank();
  if (default_mesh().rank() == 0) {
    torch::NoGradGuard no_grad;
    model.loss(make_data(2));
  }
  for (int step = 0; step < 2; ++step) model.loss(make_data(1)).backward();
  return 0;
});

const ChildCase kDiesInBackward("dies_in_backward", [] {
  auto model = start_rank();
  auto& decoder = decoder_of(model);
  auto x = decoder.blocks[1](decoder.blocks[0](decoder.embedding(make_data(1).index)));
  if (default_mesh().rank() == 1) x.register_hook([](const torch::Tensor&) { raise(SIGKILL); });
  decoder.head(decoder.norm(decoder.blocks[2](x))).sum().backward();
  return 0;
});

// From the moment when rank 0 started what went wrong until all processes had ended: no
// longer than the timeout and five seconds, and none is left.
std::vector<ProcessEnd> run_in_time(const std::string& child, int64_t world_size) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");  // where a touch is collective
  auto ends = run_processes(child, world_size, std::chrono::seconds(40));
  const auto ended = now_in_ms();
  errno = 0;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
  EXPECT_EQ(errno, ECHILD);
  for (const auto& end : ends) EXPECT_FALSE(end.killed_at_deadline) << end.output;

  const auto& output = ends[0].output;
  const auto at = output.find(kStartsAt);
  EXPECT_NE(at, std::string::npos) << output;
  if (at == std::string::npos) return ends;
  const std::chrono::milliseconds took(ended -
                                       std::stoll(output.substr(at + sizeof(kStartsAt) - 1)));
  EXPECT_LT(took, kSlowdown * (kGroupTimeout + std::chrono::seconds(5))) << output;
  return ends;
}

// Every rank ends by an exception that names what both issued, and by no signal. Rank i
// issued what `issued[i]` says.
void expect_named_on_every_rank(const std::string& child, const std::vector<std::string>& issued) {
  const auto ends = run_in_time(child, 2);
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const auto& end = ends[rank];
    const auto other = 1 - rank;
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

TEST(Divergence, EqualUnitsInOppositeOrderAreAnErrorOnEveryRankThatNamesBothUnits) {
  expect_named_on_every_rank("touches_equal_units_in_opposite_order",
                             {"all-gather of unit 'block0'", "all-gather of unit 'block1'"});
}

TEST(Divergence, ARankThatSkipsAForwardIsAnErrorOnEveryRankThatNamesBothOperations) {
  for (const auto& end : run_in_time("skips_a_forward", 2)) {
    EXPECT_EQ(end.exit_code, 1) << end.output;
    EXPECT_THAT(end.output, HasSubstr("out of order"));
    EXPECT_THAT(end.output, HasSubstr("all-gather of unit '"));
    EXPECT_THAT(end.output, HasSubstr("reduce-scatter of unit '"));
  }
}

TEST(Divergence, ARankThatDiesInBackwardIsAnErrorOfEveryOtherRankThatNamesTheUnit) {
  const auto ends = run_in_time("dies_in_backward", 3);
  EXPECT_EQ(ends[1].exit_code, 128 + SIGKILL) << ends[1].output;
  for (const size_t survivor : {0, 2}) {
    EXPECT_EQ(ends[survivor].exit_code, 1) << ends[survivor].output;
    EXPECT_THAT(ends[survivor].output, HasSubstr("of unit '"));
  }
}

}  // namespace
}  // namespace fsdp::testing
