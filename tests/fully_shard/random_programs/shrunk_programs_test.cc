// Programs that random seeds found and shrinking made small, each a bug once.
#include "tests/fully_shard/random_programs/program_run.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <mutex>

namespace fsdp::testing {
namespace {

class ShrunkPrograms : public ::testing::TestWithParam<int> {
 protected:
  void expect_unsharded_numbers(Program program) const {
    program.world = GetParam();
    std::mutex mutex;
    run_ranks(program.world, [&](int64_t rank) {
      const auto difference =
          run_program(program, rank, init_device_mesh(c10::kCPU, {program.world}));
      std::lock_guard lock(mutex);
      EXPECT_FALSE(difference.has_value()) << difference.value_or("") << "\n" << to_string(program);
    });
  }

  static Node anchored_root() {
    return {.id = 0,
            .params = {{.id = 0, .use = Use::kMatmul, .rows = 3, .anchor = true}},
            .is_unit = true};
  }
};

TEST_P(ShrunkPrograms, ARecomputationReadsAUnitUnderNoGradAfterAnOptimizerStep) {
  Program program{.root = anchored_root()};
  program.root.children = {
      {.id = 1,
       .children =
           {{.id = 2, .params = {{.id = 1, .rows = 2}}, .is_unit = true, .no_grad = true},
            {.id = 3, .params = {{.id = 2, .rows = 2}}, .is_unit = true, .joins_previous = true}},
       .checkpoint = true}};
  program.actions = {
      {.kind = ActionKind::kTrain}, {.kind = ActionKind::kStep}, {.kind = ActionKind::kTrain}};
  expect_unsharded_numbers(program);
}

TEST_P(ShrunkPrograms, GradientsLeftUnsynchronisedJoinABackwardThatDoesNotUseTheParameter) {
  Program program{.root = anchored_root()};
  program.root.children = {
      {.id = 1, .params = {{.id = 1, .rows = 2}}, .is_unit = true, .conditional = true}};
  program.actions = {{.kind = ActionKind::kSetSync, .flag = false},
                     {.kind = ActionKind::kTrain},
                     {.kind = ActionKind::kSetSync, .flag = true},
                     {.kind = ActionKind::kTrain, .condition = false}};
  expect_unsharded_numbers(program);
}

TEST_P(ShrunkPrograms, AUnitThatTakesPartAfterItsPlaceInTheOrderIsReduced) {
  Program program{.root = anchored_root()};
  program.root.params.push_back({.id = 1});
  program.root.children = {{.id = 1, .params = {{.id = 2}}, .is_unit = true},
                           {.id = 2,
                            .children = {{.id = 3, .params = {{.id = 3}}, .is_unit = true}},
                            .checkpoint = true}};
  program.actions = {{.kind = ActionKind::kTrain}};
  expect_unsharded_numbers(program);
}

INSTANTIATE_WORLDS(ShrunkPrograms, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
