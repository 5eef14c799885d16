// What one rank does without the others is an error on all of them, by name and in time.
#include "tests/fully_shard/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/slowdown.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <sstream>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class OneRankAlone : public Worlds {
 protected:
  // Rank 0 does something first, then all ranks train.
  void expect_named(const std::function<void(DecoderImpl& model, const Model&)>& alone) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      auto model = build_seeded([] { return decoder_model(4, 3); });
      shard_decoder(*model.module, mesh);
      const auto begin = std::chrono::steady_clock::now();
      const auto message = message_of([&] {
        if (rank == 0) alone(dynamic_cast<DecoderImpl&>(*model.module), model);
        for (int step = 0; step < 2; ++step) model.loss(make_data(1)).backward();
      });
      EXPECT_THAT(message, AllOf(HasSubstr("rank 0 issued"), HasSubstr("out of order")));
      EXPECT_THAT(message,
                  AnyOf(HasSubstr("all-gather of unit '"), HasSubstr("reduce-scatter of unit '")));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(10))
          << "waited for the timeout";
    });
  }
};

TEST_P(OneRankAlone, PrintingAWeightOnRankZero) {
  expect_named([](DecoderImpl& model, const Model&) {
    std::ostringstream() << model.blocks[2]->up->weight.abs().max().item<float>();
  });
}

TEST_P(OneRankAlone, TheWholeValueOfAnEntryOnRankZero) {
  expect_named([](DecoderImpl& model, const Model&) {
    DTensor(model.blocks[1]->up->parameters()[0].detach()).full_tensor();
  });
}

TEST_P(OneRankAlone, ANormOfAnEntryOnRankZero) {
  expect_named([](DecoderImpl& model, const Model&) {
    torch::NoGradGuard no_grad;
    std::ostringstream() << model.head->parameters()[0].norm().item<float>();
  });
}

TEST_P(OneRankAlone, ExpertsAsUnitsWithARouteOfEachRanksOwn) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = build_seeded([] { return decoder_model(4, 2); });
    shard_decoder(*model.module, mesh);
    auto& experts = dynamic_cast<DecoderImpl&>(*model.module).blocks;
    EXPECT_THAT(message_of([&] {
                  experts[rank == 0 ? 0 : 1](torch::ones({2, 4})).sum().backward();
                }),
                AllOf(HasSubstr("'block0'"), HasSubstr("'block1'")));
  });
}

INSTANTIATE_WORLDS(OneRankAlone, 2, 3);

// Rank 0 has come to its training's first gather, the other to a reduction. These have
// orders of their own, so the two never meet: what both wait in is told through the
// store.
TEST(AnEvaluationOnOneRank, IsAnErrorOnBothThatNamesWhatEachWaitsIn) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    auto model = build_seeded([] { return decoder_model(4, 3); });
    shard_decoder(*model.module, mesh);
    const auto begin = std::chrono::steady_clock::now();
    const auto message = message_of([&] {
      if (rank == 0) {
        torch::NoGradGuard no_grad;
        model.loss(make_data(2));
      }
      for (int step = 0; step < 2; ++step) model.loss(make_data(1)).backward();
    });
    EXPECT_THAT(message, AllOf(HasSubstr("out of order"), HasSubstr("all-gather of unit '"),
                               HasSubstr("reduce-scatter of unit '")));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(15))
        << "waited for the timeout";
  });
}

}  // namespace
}  // namespace fsdp::testing
