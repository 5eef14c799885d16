// What one rank does without the others is an error on all of them, by name and in time,
// where a touch is collective: over Gloo. Where ranks share memory it is none
// (transport/one_sided_reads_test.cc).
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/full_value.h"
#include "tests/support/slowdown.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

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

 private:
  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // where a touch is collective
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

// What a rank that has no samples left computes, so that its collectives are those of the
// others.
torch::Tensor nothing_of(const std::vector<torch::Tensor>& parameters) {
  auto sum = torch::zeros({});
  for (const auto& parameter : parameters) sum = sum + 0 * parameter.sum();
  return sum;
}

class WithoutSamples : public Worlds {
 protected:
  using Parameters = std::vector<torch::Tensor>;

  bool has_samples(int64_t rank) const { return rank + 1 < world(); }

  // A decoder's units are not registered in the order of forward. Members and entries are
  // the same here.
  void expect_named(bool of_entries) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      auto model = build_seeded([] { return decoder_model(4, 3); });
      const auto members = model.module->parameters();
      shard_decoder(*model.module, mesh);
      const auto added = of_entries ? model.module->parameters() : members;
      const auto begin = std::chrono::steady_clock::now();
      const auto message = message_of(
          [&] { (has_samples(rank) ? model.loss(make_data(1)) : nothing_of(added)).backward(); });
      EXPECT_THAT(message, AllOf(HasSubstr("out of order"), HasSubstr("gather of unit '(root)'"),
                                 HasSubstr("gather of unit 'block1'")));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(10))
          << "waited for the timeout";
    });
  }

  // Three units in the order of forward; two steps of which are as unsharded.
  void train(int64_t rank, const DeviceMesh& mesh, bool reshard_after_forward) const {
    const auto build = [] {
      return torch::nn::Sequential(make_linear(3, 4), make_linear(4, 5), make_linear(5, 2));
    };
    const auto loss_of = [](torch::nn::Sequential& model, int64_t rank, int64_t step) {
      const auto input = torch::full({2, 3}, 0.1 * static_cast<double>(rank + 1 + step));
      return model->forward(input).pow(2).sum();
    };
    auto plain = build(), model = build();
    for (auto& layer : *model) {
      fully_shard(layer.ptr(), mesh,
                  {.reshard_after_forward = ReshardAfterForward(reshard_after_forward)});
    }
    fully_shard(model, mesh);
    torch::optim::SGD of_plain(plain->parameters(), 0.1), of_model(model->parameters(), 0.1);
    for (int64_t step = 0; step < 2; ++step) {
      of_plain.zero_grad(), of_model.zero_grad();
      for (int64_t other = 0; has_samples(other); ++other)
        (loss_of(plain, other, step) / world()).backward();
      (has_samples(rank) ? loss_of(model, rank, step) : nothing_of(model->parameters())).backward();
      of_plain.step(), of_model.step();
      expect_same(plain->parameters(), model->parameters());
    }
  }

 private:
  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // where a touch is collective
  static void expect_same(const Parameters& plain, const Parameters& sharded) {
    for (size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(torch::allclose(full_value(sharded[i]), plain[i])) << i;
  }
};

TEST_P(WithoutSamples, ARankThatAddsUpADecodersMembersIsNamed) { expect_named(false); }
TEST_P(WithoutSamples, ARankThatAddsUpADecodersEntriesIsNamed) { expect_named(true); }

TEST_P(WithoutSamples, ARankCountsAsZeroWhereUnitsComeInTheOrderOfForwardAndStay) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) { train(rank, mesh, false); });
}

// In backward a sum needs no values, which the layers gather again.
TEST_P(WithoutSamples, ARankIsNamedWhereOthersGatherInBackward) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    EXPECT_THAT(message_of([&] { train(rank, mesh, true); }),
                AllOf(HasSubstr("out of order"), HasSubstr("all-gather of unit '1'"),
                      HasSubstr("reduce-scatter of unit '")));
  });
}

INSTANTIATE_WORLDS(WithoutSamples, 2, 3);

// Rank 0 has come to its training's first gather, the other to a reduction. These have
// orders of their own, so the two never meet: what both wait in is told through the
// store.
TEST(AnEvaluationOnOneRank, IsAnErrorOnBothThatNamesWhatEachWaitsIn) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
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
