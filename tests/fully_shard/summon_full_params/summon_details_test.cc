// SummonFullParams where there is nothing to show, and where it costs more than it looks.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/warnings.h"
#include "tests/support/worlds.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SummonDetails : public Worlds {};

TEST_P(SummonDetails, MissingGradientsStayMissing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    torch::linear(torch::ones({1, 4}), layer->weight).sum().backward();  // the bias is not used
    {
      const SummonFullParams full(layer, {.with_grads = true});
      EXPECT_TRUE(torch::equal(layer->parameters()[0].grad(), torch::ones({4, 4})));
      EXPECT_FALSE(layer->parameters()[1].grad().defined());
    }
    EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[0]), torch::ones({4, 4})));
    EXPECT_FALSE(layer->parameters()[1].grad().defined());
  });
}

// Under NoSyncGuard a rank may leave out what others use: an expert, say.
TEST_P(SummonDetails, AGradientThatWaitsOnOneRankIsAnErrorOnAll) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    layer->parameters()[0].set_requires_grad(false);
    auto unit = get_fsdp_module(layer);
    {
      const NoSyncGuard no_sync(unit);
      auto y = torch::linear(torch::ones({1, 4}, torch::requires_grad()), layer->weight);
      if (rank == 0) y = y + layer->bias;
      y.sum().backward();
    }
    const auto summon = [&] { const SummonFullParams full(layer, {.with_grads = true}); };
    EXPECT_THAT(message_of<c10::ValueError>(summon),
                AllOf(HasSubstr("'bias'"), HasSubstr("waits for synchronisation on rank 0")));
    unit.zero_pending_gradients();
    summon();
  });
}

TEST_P(SummonDetails, AGradientOfOneRankAloneIsAnErrorOnAll) {
  if (world() == 1) return;
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    auto bias = layer->parameters()[1];
    if (rank == 0) bias.mutable_grad() = torch::zeros_like(bias);
    const auto summon = [&] { const SummonFullParams full(layer, {.with_grads = true}); };
    EXPECT_THAT(
        message_of<c10::ValueError>(summon),
        HasSubstr("the ranks differ in gradients: rank 0 has one of 'bias' where rank 1 has "
                  "none of 'bias'"));
    bias.mutable_grad().reset();
    summon();
  });
}

TEST_P(SummonDetails, OffloadingOnEveryRankWarnsThatEachCopiesTheModel) {
  const c10::WarningUtils::WarnAlways always;
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    Warnings warnings;
    {
      const SummonFullParams full(layer,
                                  {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
    }
    EXPECT_THAT(warnings.texts(), IsEmpty());
    { const SummonFullParams full(layer, {.offload_to_cpu = true}); }
    EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("copies the whole model on every rank")));
  });
}

TEST_P(SummonDetails, GradientsChangedWithoutWritebackStayAsTheyWere) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    layer(torch::ones({1, 4})).sum().backward();
    {
      const SummonFullParams full(layer, {.writeback = false, .with_grads = true});
      for (auto& parameter : layer->parameters()) parameter.mutable_grad().mul_(2);
    }
    EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[0]), torch::ones({4, 4})));
    EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[1]), torch::ones({4})));
  });
}

// Rows are padded where ranks have parts of different sizes; who edits never sees that.
TEST_P(SummonDetails, NothingThatIsShownIsPadding) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    for (const bool offloads : {false, true}) {
      auto layer = make_linear(3, 5);
      const auto bias = layer->bias.detach().clone();
      fully_shard(layer, mesh);
      {
        const SummonFullParams full(layer, {.offload_to_cpu = offloads});
        EXPECT_EQ(layer->parameters()[0].sizes(), (std::vector<int64_t>{5, 3}));
        const torch::NoGradGuard no_grad;
        layer->parameters()[0].fill_(3);
      }
      EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]), torch::full({5, 3}, 3.0F)));
      EXPECT_TRUE(torch::equal(full_value(layer->parameters()[1]), bias));
    }
  });
}

TEST_P(SummonDetails, OffloadedParametersAreOrdinaryMemory) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    const auto expected = layer->weight.detach().clone();
    fully_shard(layer, mesh);
    const SummonFullParams full(layer, {.offload_to_cpu = true});
    const auto gathers = counters(mesh).all_gathers;
    const auto weight = layer->parameters()[0];
    ASSERT_FALSE(weight.is_same(layer->weight));
    EXPECT_NO_THROW(weight.data_ptr());
    EXPECT_TRUE(torch::equal(weight.detach(), expected));
    EXPECT_EQ(counters(mesh).all_gathers, gathers);
  });
}

TEST_P(SummonDetails, AVisitOfAllParametersGathersEachUnitOnceAndAllButTheFirstAhead) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(make_linear(4, 4), make_linear(4, 4), make_linear(4, 4));
    for (const auto& layer : model->children()) fully_shard(*layer, mesh);
    fully_shard(model, mesh);
    for_each_full_param(*model, [](const std::string&, const at::Tensor&) {});
    const int64_t sent = mesh.size() > 1 ? 1 : 0;
    EXPECT_EQ(counters(mesh).all_gathers, 3 * sent);
    EXPECT_EQ(counters(mesh).prefetched_all_gathers, 2 * sent);
  });
}

INSTANTIATE_WORLDS(SummonDetails, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
