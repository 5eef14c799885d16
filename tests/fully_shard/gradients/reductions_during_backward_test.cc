// When reductions leave in a backward, what is gathered for branches, and that its end is
// one.
#include "fully_shard/units/unit_events.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;

class BackwardProgress : public Worlds {};

// The reductions that had left when each backward of this thread ended.
class EndLog final : public internal::UnitObserver {
 public:
  explicit EndLog(const DeviceMesh& mesh) : mesh_(mesh) {}

  std::vector<int64_t> reductions_at_ends;

  void touched(const internal::Unit&, internal::Pass) override {}
  void gradient_arrived(const internal::Unit&) override {}
  void unshard_issued(const internal::Unit&) override {}
  void unsharded_explicitly(const internal::Unit&) override {}
  void resharded_explicitly(const internal::Unit&) override {}
  void entry_written(const internal::Unit&) override {}
  void member_written(const internal::Unit&) override {}
  void backward_ended() override {
    reductions_at_ends.push_back(counters(mesh_).reduce_scatters);
    EXPECT_EQ(counters(mesh_).staging_bytes, 0) << "a reduction is on the way";
  }
  void backward_aborted() override { ADD_FAILURE() << "aborted"; }

 private:
  DeviceMesh mesh_;
  internal::ObserveUnits observe_{*this};
};

TEST_P(BackwardProgress, EndsOnceAfterTheLastReductionHoweverManyUnitsAndModels) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder a(mesh), b(mesh);
    const EndLog log(mesh);
    a.forward();
    a.backward();
    EXPECT_THAT(log.reductions_at_ends, ElementsAre(kUnits));
    const auto data = make_data(5);
    (loss_of(a.model, data) + loss_of(b.model, data)).backward();
    EXPECT_THAT(log.reductions_at_ends, ElementsAre(kUnits, 3 * kUnits));
  });
}

TEST_P(BackwardProgress, SendsAUnitsReductionWhileTheUnitsBeforeItCompute) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& model = *decoder.model;
    const auto data = make_data(5);
    for (int step = 0; step < 3; ++step) {
      std::vector<int64_t> sent;  // whenever backward comes to the output of a block
      const auto before = counters(mesh).reduce_scatters;
      const auto watched = [&](torch::Tensor x) {
        x.register_hook(
            [&](const torch::Tensor&) { sent.push_back(counters(mesh).reduce_scatters - before); });
        return x;
      };
      auto x = watched(model.embedding(data.index));
      for (auto& block : model.blocks) x = watched(block(x));
      model.head(model.norm(x)).pow(2).mean().backward();
      // Head and root first, then block after block; the embedding at the end.
      EXPECT_THAT(sent, ElementsAre(2, 3, 4, 5, 6)) << step;
      EXPECT_EQ(counters(mesh).reduce_scatters - before, kUnits) << step;
      decoder.update();
    }
  });
}

struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear stem = register_module("stem", make_linear(4, 4)),
                    left = register_module("left", make_linear(4, 4)),
                    right = register_module("right", make_linear(4, 4)),
                    head = register_module("head", make_linear(4, 4));
  torch::Tensor through(torch::nn::Linear& branch, const torch::Tensor& x) {
    return head(torch::tanh(branch(torch::tanh(stem(x)))));
  }
};
TORCH_MODULE(Branches);

// Forward: stem, left, head, stem, right, head; backward: head (which is there), right,
// head, left.
TEST_P(BackwardProgress, ThroughTwoBranchesGathersNothingTwice) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Branches model;
    for (auto* layer : {&model->stem, &model->left, &model->right, &model->head})
      fully_shard(*layer, mesh);
    fully_shard(model, mesh);
    const auto x = torch::ones({2, 4});
    for (int step = 0; step < 4; ++step) {
      const auto traffic = traffic_of(mesh, [&] {
        const auto one = model->through(model->left, x);
        (one + model->through(model->right, x)).sum().backward();
      });
      EXPECT_EQ(traffic.all_gathers - traffic.unused, 6 + 3) << step;
      EXPECT_EQ(traffic.reduce_scatters, 4) << step;
      EXPECT_EQ(counters(mesh).staging_bytes, 0) << step;
      model->zero_grad();
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(0.5);
    }
  });
}

// A unit with two outputs; each goes through a unit of its own.
struct TwoOutputsImpl : torch::nn::Module {
  struct Split : torch::nn::Module {
    torch::nn::Linear a = register_module("a", make_linear(4, 4)),
                      b = register_module("b", make_linear(4, 4));
    std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) { return {a(x), b(x)}; }
  };
  std::shared_ptr<Split> split = register_module("split", std::make_shared<Split>());
  torch::nn::Linear after_a = register_module("after_a", make_linear(4, 4)),
                    after_b = register_module("after_b", make_linear(4, 4));
  torch::Tensor forward(const torch::Tensor& x) {
    const auto [a, b] = split->forward(x);
    const auto one = after_a(torch::tanh(a));
    return one + after_b(torch::tanh(b));
  }
};
TORCH_MODULE(TwoOutputs);

// Backward: after_b (which is there), after_a, and both halves of split at once.
TEST_P(BackwardProgress, OfTwoOutputsGathersTheirUnitOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    TwoOutputs model;
    fully_shard(model->split, mesh);
    fully_shard(model->after_a, mesh);
    fully_shard(model->after_b, mesh);
    fully_shard(model, mesh);
    for (int step = 0; step < 3; ++step) {
      const auto x = torch::ones({2, 4}, torch::requires_grad());  // backward reads split, too
      torch::Tensor loss;
      const auto forward = traffic_of(mesh, [&] { loss = model(x).sum(); });
      const auto backward = traffic_of(mesh, [&] { loss.backward(); });
      EXPECT_EQ(forward.all_gathers - forward.unused, 3) << step;
      EXPECT_EQ(backward.all_gathers - backward.unused, 2) << step;
      EXPECT_EQ(backward.reduce_scatters, 3) << step;
      for (const auto& parameter : model->split->parameters())
        EXPECT_TRUE(parameter.grad().defined()) << step;
      model->zero_grad();
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(0.5);
    }
  });
}

INSTANTIATE_WORLDS(BackwardProgress, 2, 3);

}  // namespace
}  // namespace fsdp::testing
