// Several models on one mesh: switches, schedules and failures of one are its own.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::testing {
namespace {

constexpr auto kStepGathers = MeasuredDecoder::kStepGathers;

class ScopeEffects : public Worlds {};

int64_t count_gradients(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.grad().defined() ? 1 : 0;
  return count;
}

TEST_P(ScopeEffects, IsLastBackwardFalseOfOneModelLeavesAnothersGradientsAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh);
    const auto all = static_cast<int64_t>(b.model->parameters().size());
    a.root().set_is_last_backward(false);
    b.forward();
    EXPECT_EQ(b.backward().reduce_scatters, kUnits);
    EXPECT_EQ(count_gradients(*b.model), all);
    EXPECT_EQ(b.resident_bytes(), 0);
    const auto once = full_gradient(b.model->head->parameters()[0]);

    a.forward();
    a.backward();
    EXPECT_EQ(count_gradients(*a.model), 0);
    EXPECT_EQ(count_gradients(*b.model), all);
    EXPECT_TRUE(torch::equal(full_gradient(b.model->head->parameters()[0]), once));
    b.forward();
    b.backward();  // the last of its own
    EXPECT_EQ(count_gradients(*a.model), 0);

    a.root().set_is_last_backward(true);
    a.forward();
    a.backward();
    EXPECT_EQ(count_gradients(*a.model), all);
    EXPECT_TRUE(torch::allclose(full_gradient(a.model->head->parameters()[0]), 2 * once));
    EXPECT_EQ(a.resident_bytes(), 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
  });
}

TEST_P(ScopeEffects, IsLastBackwardFalseEmptiesNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
    decoder.root().set_is_last_backward(false);
    decoder.forward();
    decoder.backward();
    EXPECT_GT(decoder.resident_bytes(), 0);
    decoder.root().set_is_last_backward(true);
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(decoder.resident_bytes(), 0);
  });
}

TEST_P(ScopeEffects, ForgettingOneScheduleLeavesAnotherAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh);
    const auto learned = kStepGathers - 1, unlearned = kUnits - 2;
    for (auto* decoder : {&a, &b}) {
      EXPECT_EQ(decoder->step().prefetched, unlearned);
      EXPECT_EQ(decoder->step().prefetched, learned);
    }
    a.root().reset_lazy_init();
    EXPECT_EQ(b.step().prefetched, learned);
    EXPECT_EQ(a.step().prefetched, unlearned);
    EXPECT_EQ(b.step().prefetched, learned);
    EXPECT_EQ(a.step().prefetched, learned);
  });
}

TEST_P(ScopeEffects, AFailedBackwardLeavesAnotherModelsParametersAndPendingGradients) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh);
    b.root().set_reshard_after_backward(false);
    {
      NoSyncGuard guard(b.root());
      b.forward();
      b.backward();
    }
    const auto kept = counters(mesh);
    EXPECT_GT(resident_bytes(kept), 0);
    EXPECT_GT(kept.gradient_bytes, 0);

    auto x = a.model->embedding(make_data(5).index);
    for (auto& block : a.model->blocks) x = block(x);
    x.register_hook([](const torch::Tensor&) { throw std::runtime_error("in backward"); });
    EXPECT_THROW(a.model->head(a.model->norm(x)).sum().backward(), std::exception);
    EXPECT_EQ(resident_bytes(counters(mesh)), resident_bytes(kept));
    EXPECT_EQ(counters(mesh).gradient_bytes, kept.gradient_bytes);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);

    EXPECT_EQ(b.forward().all_gathers, 1);  // the embedding; the rest was kept
    b.backward();
    const auto sum = full_gradient(b.model->head->parameters()[0]);
    b.model->zero_grad();
    b.forward();
    b.backward();
    EXPECT_TRUE(torch::allclose(sum, 2 * full_gradient(b.model->head->parameters()[0])));

    EXPECT_EQ(a.step().reduce_scatters, kUnits);  // a clean step
  });
}

TEST_P(ScopeEffects, ModelsTrainedInTurnHaveTheCountsOfOneAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder generator(mesh), discriminator(mesh);
    for (int step = 0; step < 4; ++step) {
      for (auto* model : {&generator, &discriminator}) {
        const auto traffic = model->step();
        EXPECT_EQ(traffic.all_gathers, kStepGathers) << step;
        EXPECT_EQ(traffic.prefetched, step == 0 ? kUnits - 2 : kStepGathers - 1) << step;
        EXPECT_EQ(traffic.reduce_scatters, kUnits) << step;
      }
    }
  });
}

TEST_P(ScopeEffects, BackwardOfOneModelLeavesAnothersForwardAsItWas) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh, {.reshard_after_forward = false});
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(a.forward().all_gathers, kUnits) << step;
      EXPECT_EQ(b.forward().all_gathers, kUnits) << step;
      EXPECT_EQ(a.backward().all_gathers, kBlocks) << step;
      EXPECT_EQ(a.inference().all_gathers, kUnits) << step;
      EXPECT_EQ(b.backward().all_gathers, 0) << step;
      a.update();
      b.update();
    }
  });
}

TEST_P(ScopeEffects, OneBackwardThroughTwoModelsReducesBoth) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh), alone(mesh);
    for (int step = 0; step < 3; ++step) {
      const auto traffic = traffic_of(mesh, [&] {
        const auto data = make_data(5);
        (loss_of(a.model, data) + loss_of(b.model, data)).backward();
      });
      EXPECT_EQ(traffic.reduce_scatters, 2 * kUnits) << step;
      EXPECT_EQ(resident_bytes(counters(mesh)), 0) << step;
      alone.forward();
      alone.backward();
      EXPECT_TRUE(torch::equal(full_gradient(a.model->head->parameters()[0]),
                               full_gradient(alone.model->head->parameters()[0])));
      EXPECT_TRUE(torch::equal(full_gradient(b.model->blocks[0]->parameters()[2]),
                               full_gradient(alone.model->blocks[0]->parameters()[2])));
      for (auto* model : {&a, &b, &alone}) model->update();
    }
  });
}

TEST_P(ScopeEffects, ARootThatReshardsGoesWhenAnotherOnItsMeshIsTouched) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto a = make_linear(8, 8), b = make_linear(4, 4);
    fully_shard(a, mesh, {.reshard_after_forward = true});
    fully_shard(b, mesh, {.reshard_after_forward = true});
    b(torch::ones({1, 4}));
    const auto bytes_of_b = resident_bytes(counters(mesh));
    a(torch::ones({1, 8}));
    b(torch::ones({1, 4}));
    EXPECT_EQ(resident_bytes(counters(mesh)), bytes_of_b);
  });
}

TEST_P(ScopeEffects, ARootThatGetsAnAncestorBringsItsCounts) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(make_linear(4, 4));
    auto below = fully_shard(*model->ptr(0), mesh);
    model->forward(torch::ones({1, 4})).sum().backward();
    const auto before = below.counters();
    EXPECT_GT(before.all_gathers, 0);
    EXPECT_GT(before.sharded_bytes, 0);
    const auto above = fully_shard(model, mesh).counters();
    EXPECT_EQ(above.all_gathers, before.all_gathers);
    EXPECT_EQ(above.reduce_scatters, before.reduce_scatters);
    EXPECT_EQ(above.sharded_bytes, before.sharded_bytes);
    EXPECT_EQ(above.peak_bytes, before.peak_bytes);
  });
}

TEST_P(ScopeEffects, ForgettingAScheduleForgetsWhereARootsForwardIsOver) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {}, {.reshard_after_forward = true});
    const auto bytes_after_forward = [&] {
      decoder.forward();
      const auto bytes = decoder.resident_bytes();
      decoder.backward();
      return bytes;
    };
    const auto unknown = bytes_after_forward(), known = bytes_after_forward();
    EXPECT_LT(known, unknown);
    decoder.root().reset_lazy_init();
    EXPECT_EQ(bytes_after_forward(), unknown);
    EXPECT_EQ(bytes_after_forward(), known);
  });
}

INSTANTIATE_WORLDS(ScopeEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
