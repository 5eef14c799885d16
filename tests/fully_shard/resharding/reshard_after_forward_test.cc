// reshard_after_forward, seen in all-gathers and bytes.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class ReshardAfterForwardEffects : public Worlds {};

TEST_P(ReshardAfterForwardEffects, UnsetGathersEveryBlockTwiceAndTheRootOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(decoder.forward().all_gathers, kUnits) << step;
      const auto backward = decoder.backward();
      EXPECT_EQ(backward.all_gathers, kBlocks) << step;
      EXPECT_EQ(backward.reduce_scatters, kUnits) << step;
      decoder.update();
    }
  });
}

TEST_P(ReshardAfterForwardEffects, FalseGathersEveryUnitOnceAStep) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(decoder.forward().all_gathers, kUnits) << step;
      const auto backward = decoder.backward();
      EXPECT_EQ(backward.all_gathers, 0) << step;
      EXPECT_EQ(backward.reduce_scatters, kUnits) << step;
      EXPECT_EQ(decoder.resident_bytes(), 0) << step;
      decoder.update();
    }
  });
}

TEST_P(ReshardAfterForwardEffects, FalseKeepsTheWholeModelBetweenForwardAndBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false}), usual(mesh);
    const auto before = decoder.resident_bytes();
    decoder.forward();
    const auto kept = decoder.resident_bytes() - before;
    int64_t bytes = 0;
    for (const auto& parameter : decoder.model->parameters()) bytes += 4 * parameter.numel();
    EXPECT_GE(kept, bytes);
    decoder.backward();
    usual.forward();
    const auto last_and_root = usual.resident_bytes();
    EXPECT_LT(last_and_root, kept / 2);
    EXPECT_GT(last_and_root, 0);
  });
}

TEST_P(ReshardAfterForwardEffects, FalseOnOneBlockSavesItsGatherInBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.block(1).set_reshard_after_forward(false, /*recurse=*/false);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(decoder.forward().all_gathers, kUnits) << step;
      EXPECT_EQ(decoder.backward().all_gathers, kBlocks - 1) << step;
      decoder.update();
    }
  });
}

TEST_P(ReshardAfterForwardEffects, UnitsKeptByPolicyAreThereForTheNextPass) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
    decoder.step();
    EXPECT_EQ(decoder.inference().all_gathers, kUnits);
    EXPECT_EQ(decoder.inference().all_gathers, 0);
    {
      c10::InferenceMode inference;
      const auto before = counters(mesh).all_gathers;
      loss_of(decoder.model, make_data(6));
      EXPECT_EQ(counters(mesh).all_gathers, before);
    }
    EXPECT_EQ(decoder.forward().all_gathers, 0);
    EXPECT_EQ(decoder.backward().all_gathers, 0);
    decoder.update();
    EXPECT_EQ(decoder.inference().all_gathers, kUnits);  // the update left the copies stale
  });
}

TEST_P(ReshardAfterForwardEffects, AStepAfterAnEvaluationGathersTheRootOnceLess) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    EXPECT_EQ(decoder.inference().all_gathers, kUnits);
    // Together: the end of an evaluation may foresee the beginning of the next pass.
    const auto both = traffic_of(mesh, [&] {
      decoder.inference();
      decoder.forward();
    });
    EXPECT_EQ(both.all_gathers - both.unused, 2 * (kUnits - 1));
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks);
  });
}

TEST_P(ReshardAfterForwardEffects, AnEvaluationBetweenForwardAndBackwardKeepsTheRoot) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    EXPECT_EQ(decoder.forward().all_gathers, kUnits);
    // The head, last of the forward, waits for its turn; the root is kept.
    EXPECT_EQ(decoder.inference().all_gathers, kUnits - 2);
    EXPECT_EQ(decoder.backward().all_gathers, kBlocks);
  });
}

TEST_P(ReshardAfterForwardEffects, TheSetterIsTheOption) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    EXPECT_EQ(decoder.step().all_gathers, MeasuredDecoder::kStepGathers);
    decoder.root().set_reshard_after_forward(false);
    EXPECT_EQ(decoder.step().all_gathers, kUnits);
    EXPECT_EQ(decoder.step().all_gathers, kUnits);
    for (int64_t i = 0; i < kBlocks; ++i) decoder.block(i).set_reshard_after_forward(true);
    EXPECT_EQ(decoder.step().all_gathers, MeasuredDecoder::kStepGathers);
  });
}

TEST_P(ReshardAfterForwardEffects, TrueOnTheRootReshardsItAfterItsForward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh, {}, {.reshard_after_forward = true});
    int64_t after_forward[3];
    for (int64_t& bytes : after_forward) {
      EXPECT_EQ(decoder.forward().all_gathers, kUnits);
      bytes = decoder.resident_bytes();
      EXPECT_EQ(decoder.backward().all_gathers, kBlocks + 1);
      decoder.update();
    }
    // Known from the second round on: it goes as soon as the head is touched.
    EXPECT_LT(after_forward[1], after_forward[0]);
    EXPECT_EQ(after_forward[2], after_forward[1]);
  });
}

TEST_P(ReshardAfterForwardEffects, TrueSetForTheWholeModelReshardsTheRootToo) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.root().set_reshard_after_forward(true);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(decoder.step().all_gathers, MeasuredDecoder::kStepGathers + 1) << step;
    }
    decoder.inference();
    decoder.inference();  // the first one did not know when the root would be done
    EXPECT_EQ(decoder.inference().all_gathers, kUnits);
  });
}

// A weight of its own, used before or after two units below it.
struct Stage : torch::nn::Module {
  explicit Stage(bool own_first) : own_first_(own_first) {}
  torch::Tensor forward(torch::Tensor x) {
    if (own_first_) x = own(x);
    x = second(first(x));
    return own_first_ ? x : own(x);
  }
  torch::nn::Linear own = register_module("own", torch::nn::Linear(8, 8));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));

 private:
  bool own_first_;
};

struct Stages : torch::nn::Module {
  explicit Stages(bool own_first)
      : stage(register_module("stage", std::make_shared<Stage>(own_first))) {}
  torch::Tensor forward(const torch::Tensor& x) { return stage->forward(x); }
  std::shared_ptr<Stage> stage;
};

struct StageGathers {
  int64_t forward, backward;
  int64_t bytes_after_forward;
};

StageGathers stage_step(Stages& model, const DeviceMesh& mesh) {
  StageGathers result{};
  torch::Tensor loss;
  const auto x = torch::ones({2, 8}, torch::requires_grad());
  result.forward = traffic_of(mesh, [&] { loss = model.forward(x).sum(); }).all_gathers;
  result.bytes_after_forward = resident_bytes(counters(mesh));
  result.backward = traffic_of(mesh, [&] { loss.backward(); }).all_gathers;
  return result;
}

std::shared_ptr<Stages> shard_stages(bool own_first, const DeviceMesh& mesh,
                                     const FullyShardOptions& ancestor) {
  auto model = std::make_shared<Stages>(own_first);
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(0.1);
  }
  fully_shard(model->stage->first, mesh);
  fully_shard(model->stage->second, mesh);
  fully_shard(model->stage, mesh, ancestor);
  fully_shard(model, mesh);
  return model;
}

TEST_P(ReshardAfterForwardEffects, TrueOnAnAncestorReshardsItWhenTheNextUnitIsTouched) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto usual = shard_stages(/*own_first=*/true, mesh, {});
    const auto resharding = shard_stages(true, mesh, {.reshard_after_forward = true});
    for (int step = 0; step < 3; ++step) {
      const auto kept = stage_step(*usual, mesh);
      EXPECT_EQ(kept.forward, 3) << step;
      EXPECT_EQ(kept.backward, 1) << step;  // `first`; the stage stayed, `second` was last
      const auto gone = stage_step(*resharding, mesh);
      EXPECT_EQ(gone.forward, 3) << step;
      EXPECT_EQ(gone.backward, 2) << step;
      if (step == 0) {
        EXPECT_EQ(gone.bytes_after_forward, kept.bytes_after_forward);  // not known yet
      } else {
        EXPECT_EQ(2 * gone.bytes_after_forward, kept.bytes_after_forward) << step;
      }
    }
  });
}

TEST_P(ReshardAfterForwardEffects, TrueOnAnAncestorThatIsLastInForwardKeepsItForBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto model = shard_stages(/*own_first=*/false, mesh, {.reshard_after_forward = true});
    for (int step = 0; step < 3; ++step) {
      const auto gathers = stage_step(*model, mesh);
      EXPECT_EQ(gathers.forward, 3) << step;
      EXPECT_EQ(gathers.backward, 1) << step;  // `first`; `second` is still in turn, the stage last
    }
  });
}

INSTANTIATE_WORLDS(ReshardAfterForwardEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
