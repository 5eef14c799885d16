// Programs at random whose ranks use other units, in another order and number, beside
// plain ones that see all ranks' data; and those that are not legal, which end in an
// error on every rank. FSDP_DIVERGENT_PROGRAMS and FSDP_FIRST_SEED in the environment
// choose how many and which.
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "tests/fully_shard/rank_divergent/experts.h"
#include "tests/support/errors.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/slowdown.h"
#include "tests/support/worlds.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

namespace fsdp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr uint64_t kShare = 100, kAll = 300;

// What ranks do between steps that concerns nobody else.
struct Pause {
  int64_t evaluations = 0;  // of these experts
  std::vector<int64_t> experts = {};
  int64_t microseconds = 0;
};

struct DivergentProgram {
  int64_t world = 2;
  FullyShardOptions options = {};
  struct Step {
    std::vector<RanksStep> of_ranks;
    std::vector<Pause> pauses;  // by rank
  };
  std::vector<Step> steps;
};

std::vector<int64_t> draw_experts(std::mt19937& generator) {
  std::vector<int64_t> experts(ExpertsImpl::kCount);
  std::iota(experts.begin(), experts.end(), 0);
  std::shuffle(experts.begin(), experts.end(), generator);
  experts.resize(generator() % (experts.size() + 1));
  if (generator() % 2 == 0) std::sort(experts.begin(), experts.end());
  return experts;
}

RanksStep draw_batches(std::mt19937& generator, int64_t rank) {
  RanksStep batches(1 + (generator() % 3 == 0 ? generator() % 3 : 0));
  for (auto& batch : batches) {
    const int64_t samples = 1 + static_cast<int64_t>(generator() % 4);
    batch = {expert_input(rank, static_cast<int64_t>(generator() % 10), samples),
             draw_experts(generator)};
  }
  return batches;
}

DivergentProgram draw_program(uint64_t seed) {
  std::mt19937 generator(static_cast<uint32_t>(seed));
  DivergentProgram program;
  program.world = 2 + static_cast<int64_t>(generator() % 3);
  if (generator() % 2 == 0) program.options.reshard_after_forward = generator() % 2 == 0;
  program.steps.resize(1 + generator() % 3);
  for (auto& step : program.steps) {
    for (int64_t rank = 0; rank < program.world; ++rank) {
      step.of_ranks.push_back(draw_batches(generator, rank));
      step.pauses.push_back({.evaluations = static_cast<int64_t>(generator() % 3),
                             .experts = draw_experts(generator),
                             .microseconds = generator() % 4 == 0 ? 2000 : 0});
    }
  }
  return program;
}

void pause(ExpertTwins& twins, const Pause& pause) {
  if (pause.microseconds > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(pause.microseconds));
  for (int64_t i = 0; i < pause.evaluations; ++i)
    twins.expect_equal_forward({expert_input(0, i), pause.experts});
}

TEST(RankDivergentPrograms, HaveTheMeanOfAllRanks) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_DIVERGENT_PROGRAMS", kShare, kAll);
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE("FSDP_DIVERGENT_PROGRAMS=1 FSDP_FIRST_SEED=" + std::to_string(seed));
    const auto program = draw_program(seed);
    on_ranks_of(program.world, [&](int64_t rank, const DeviceMesh& mesh) {
      ExpertTwins twins(mesh, program.options);
      for (const auto& step : program.steps) {
        pause(twins, step.pauses[static_cast<size_t>(rank)]);
        twins.step(step.of_ranks);
      }
      twins.expect_equal_forward({expert_input(0, 0), {0, 1, 2, 3}});
    });
  }
}

// What one rank does otherwise, in a step of its own.
enum class Fault { kSkipsStep, kWritesAlone, kThrowsInBackward, kRunsNoBackward, kTrainsLess };

void run_fault(ExpertTwins& twins, Fault fault, const MicroBatch& batch, bool is_mine) {
  if (is_mine && fault == Fault::kWritesAlone) {
    const torch::NoGradGuard no_grad;
    twins.model->head->parameters()[0].mul_(2);
  }
  if (is_mine && fault == Fault::kTrainsLess) {
    for (auto& parameter : twins.model->head->parameters()) parameter.requires_grad_(false);
  }
  if (!is_mine || fault != Fault::kRunsNoBackward) {
    auto loss = twins.model(batch.input, batch.experts).sum();
    if (is_mine && fault == Fault::kThrowsInBackward)
      loss.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "has thrown"); });
    loss.backward();
  }
  if (!is_mine || fault != Fault::kSkipsStep) twins.optimizer_steps();
}

// After the fault all ranks go on as if nothing had been, until they hear of it.
TEST(RankDivergentPrograms, ThatAreNotLegalEndInAnErrorOnEveryRank) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_DIVERGENT_PROGRAMS", kShare, kAll) / 20;
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE("FSDP_DIVERGENT_PROGRAMS=20 FSDP_FIRST_SEED=" + std::to_string(seed));
    const auto program = draw_program(seed);
    const auto fault = static_cast<Fault>(seed % 5);
    const auto whose = static_cast<int64_t>(seed / 5) % program.world;
    on_ranks_of(program.world, [&](int64_t rank, const DeviceMesh& mesh) {
      ExpertTwins twins(mesh, program.options);
      const auto& own = program.steps.front().of_ranks[static_cast<size_t>(rank)];
      twins.step(program.steps.front().of_ranks);
      const auto begin = std::chrono::steady_clock::now();
      const auto message = message_of([&] {
        run_fault(twins, fault, own.front(), rank == whose);
        for (int64_t i = 0; i < 3; ++i) {
          twins.backward_all(own);
          twins.optimizer_steps();
        }
        internal::collectives_of(mesh, 0).barrier("end of the program");
      });
      EXPECT_THAT(
          message,
          AnyOf(HasSubstr("have not written them alike"), HasSubstr("write operators made them"),
                HasSubstr("failed before"), HasSubstr("has thrown"), HasSubstr("has left"),
                HasSubstr("are frozen"), HasSubstr("waits in the end of the program")));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(20));
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
