// The counters that no other test of effects looks at.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/default_generator.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::testing {
namespace {

class CountersOfSteps : public Worlds {};

TEST_P(CountersOfSteps, EveryUnitThatWasGatheredIsReshardedOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    for (int64_t step = 1; step <= 3; ++step) {
      decoder.step();
      EXPECT_EQ(counters(mesh).all_gathers, step * MeasuredDecoder::kStepGathers);
      EXPECT_EQ(counters(mesh).reshards, step * MeasuredDecoder::kStepGathers);
    }
  });
}

TEST_P(CountersOfSteps, ThePeakAfterAResetIsWhatIsHeld) {
  const WithEnvironment copies("FSDP_PEER_MEMORY", "copy");  // in place nothing is held
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    EXPECT_GT(counters(mesh).peak_bytes, 0);
    reset_peak(mesh);
    EXPECT_EQ(counters(mesh).peak_bytes, 0);
    decoder.head().unshard();
    const auto reached = counters(mesh).peak_bytes;
    EXPECT_GE(reached, decoder.resident_bytes());
    decoder.head().reshard();
    EXPECT_EQ(counters(mesh).peak_bytes, reached);
  });
}

TEST_P(CountersOfSteps, TimeIsSpentWaitingForCollectivesOnly) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    EXPECT_EQ(counters(mesh).wait_seconds, 0);
    decoder.head().unshard();
    const auto waited = counters(mesh).wait_seconds;
    EXPECT_GT(waited, 0);
    torch::NoGradGuard no_grad;
    decoder.model->head(torch::ones({1, MeasuredDecoder::kWidth}));  // it is there
    EXPECT_EQ(counters(mesh).wait_seconds, waited);
  });
}

// A model that is one unit: nothing is left to compute while its gradients are added up.
TEST_P(CountersOfSteps, TheWaitForARankThatIsLateIsCounted) {
  constexpr auto kLate = std::chrono::milliseconds(300);
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = drawn_from_seed(1, [] { return torch::nn::Linear(4, 4); });
    fully_shard(model, mesh);
    const auto loss = model->forward(torch::ones({2, 4})).sum();
    const auto before = counters(mesh).wait_seconds;
    if (rank == 0) std::this_thread::sleep_for(kLate);
    loss.backward();
    const auto least = rank == 0 ? 0.0 : 0.5 * double(kLate.count()) / 1000;
    EXPECT_GE(counters(mesh).wait_seconds - before, least);
  });
}

INSTANTIATE_WORLDS(CountersOfSteps, 2, 3);

}  // namespace
}  // namespace fsdp::testing
