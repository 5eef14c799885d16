// Every collective of a step fails once on every rank: all ranks say which one, soon, and
// go on after a new start.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/process_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::testing {
namespace {

using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr auto kTimeout = std::chrono::milliseconds(700);

// Which collectives fail: before a landing every third.
int64_t stride() { return is_night() ? 1 : 3; }

// One training step of one rank, with `fault` in the way of its collectives along the
// mesh's first dimension; the error's text, or none.
std::string step_with_fault(const DeviceMesh& mesh, const std::shared_ptr<Fault>& fault,
                            const FullyShardOptions& options = {}) {
  auto model = build_seeded([] { return decoder_model(4, 1); });
  shard_decoder_with(options, *model.module, mesh);
  inject_fault(mesh.group(0), fault, kTimeout);
  inject_fault(mesh.side_group(0, "reduce"), fault, kTimeout);
  try {
    model.loss(make_data(static_cast<uint64_t>(mesh.rank()))).backward();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

class FaultInjection : public Worlds {
 private:
  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // whose collectives fail here
};

TEST_P(FaultInjection, AFailureAtAnyCollectiveOfAnyRankIsNamedOnAllRanksAndTheNextStartIsClean) {
  const auto world = this->world();
  int64_t collectives = 0;
  run_ranks(world, [&](int64_t rank) {
    const auto none = std::make_shared<Fault>();
    EXPECT_EQ(step_with_fault(init_device_mesh(torch::kCPU, {world}), none), "");
    if (rank == 0) collectives = none->issued;
  });
  ASSERT_GE(collectives, 9);
  for (int64_t at = 0; at < collectives; at += stride()) {
    for (int64_t faulty = 0; faulty < world; ++faulty) {
      run_ranks(world, [&](int64_t rank) {
        const auto kind = rank == faulty ? Fault::Kind::kError : Fault::Kind::kNone;
        const auto mesh = init_device_mesh(torch::kCPU, {world});
        const auto begin = std::chrono::steady_clock::now();
        const auto error =
            step_with_fault(mesh, std::make_shared<Fault>(Fault{.kind = kind, .at = at}));
        EXPECT_THAT(error,
                    AnyOf(HasSubstr("all-gather of unit '"), HasSubstr("reduce-scatter of unit '")))
            << "rank " << rank << ", collective " << at << " of rank " << faulty;
        EXPECT_LE(std::chrono::steady_clock::now() - begin, kTimeout + seconds(5));
      });
    }
  }
  expect_parity(
      world, [] { return decoder_model(4, 1); }, shard_decoder, "after the failures");
}

// HFSDP, on {outer, 1}: what is gathered and reduced over the outer dimension.
TEST_P(FaultInjection, AFailureOverTheOuterDimensionIsNamedOnAllRanks) {
  const FullyShardOptions options{.outer = Outer::kShardOptimizer};
  int64_t collectives = 0;
  const auto mesh_of_outer = [&] { return init_device_mesh(torch::kCPU, {world(), 1}); };
  run_ranks(world(), [&](int64_t rank) {
    const auto none = std::make_shared<Fault>();
    EXPECT_EQ(step_with_fault(mesh_of_outer(), none, options), "");
    if (rank == 0) collectives = none->issued;
  });
  ASSERT_GE(collectives, 8);  // four units, gathered and reduced
  for (int64_t at = 0; at < collectives; at += stride()) {
    run_ranks(world(), [&](int64_t rank) {
      const auto kind = rank == 0 ? Fault::Kind::kError : Fault::Kind::kNone;
      const auto begin = std::chrono::steady_clock::now();
      const auto error = step_with_fault(
          mesh_of_outer(), std::make_shared<Fault>(Fault{.kind = kind, .at = at}), options);
      EXPECT_THAT(error, HasSubstr(" of unit '")) << "rank " << rank << ", collective " << at;
      EXPECT_LE(std::chrono::steady_clock::now() - begin, kTimeout + seconds(5));
    });
  }
}

TEST_P(FaultInjection, ADelayAtAnyCollectiveChangesNoNumber) {
  const auto world = this->world();
  for (int64_t at = 0; at < 9; at += 2) {
    on_ranks_of(world, [&](int64_t rank, const DeviceMesh& mesh) {
      auto plain = build_seeded([] { return decoder_model(4, 1); });
      auto sharded = build_seeded([] { return decoder_model(4, 1); });
      shard_decoder(*sharded.module, mesh);
      const auto kind = rank == world - 1 ? Fault::Kind::kDelay : Fault::Kind::kNone;
      const auto fault = std::make_shared<Fault>(Fault{.kind = kind, .at = at});
      inject_fault(mesh.group(0), fault, seconds(20));
      inject_fault(mesh.side_group(0, "reduce"), fault, seconds(20));
      const auto expected = expected_gradients(plain, world, 4);
      sharded.loss(make_data(407 + static_cast<uint64_t>(rank))).backward();
      expect_gradients(*sharded.module, expected, world, "delayed");
    });
  }
}

INSTANTIATE_WORLDS(FaultInjection, 2, 3);

const ChildCase kDiesAtACollective("dies_at_a_collective", [] {
  init_process_group({.backend = "gloo", .timeout = seconds(5)});
  const auto mesh = init_device_mesh(torch::kCPU, {2});
  const auto kind = mesh.rank() == 1 ? Fault::Kind::kDeath : Fault::Kind::kNone;
  const auto error = step_with_fault(mesh, std::make_shared<Fault>(Fault{.kind = kind, .at = 6}));
  std::printf("error: %s\n", error.c_str());
  return error.empty() ? 0 : 1;
});

TEST(DeadRank, IsAnErrorThatNamesTheCollective) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  const auto ends = run_processes("dies_at_a_collective", 2, seconds(40));
  EXPECT_EQ(ends[1].exit_code, 3) << ends[1].output;
  EXPECT_NE(ends[0].exit_code, 0) << ends[0].output;
  EXPECT_FALSE(ends[0].killed_at_deadline);
  EXPECT_THAT(ends[0].output, HasSubstr("of unit '"));
}

}  // namespace
}  // namespace fsdp::testing
