// Registry entries where autograd's own leaves are meant: hooks after accumulation, and
// backward to some inputs only.
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class EntriesAsLeaves : public Worlds {};

Tensor ones_batch() { return torch::ones({2, 4}); }

struct AfterAccumulation final : torch::autograd::PostAccumulateGradHook {
  explicit AfterAccumulation(std::function<void(const Tensor&)> body) : call(std::move(body)) {}
  void operator()(const torch::autograd::Variable& tensor) override { call(tensor); }
  std::function<void(const Tensor&)> call;
};

void after_accumulation(const Tensor& entry, std::function<void(const Tensor&)> body) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      entry, std::make_unique<AfterAccumulation>(std::move(body)));
}

TEST_P(EntriesAsLeaves, AnOptimizerStepInBackwardTrainsAsOneAfterIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair plain, model;
    sharded(model, mesh);
    int calls = 0;
    for (const auto& entry : model->parameters()) {
      after_accumulation(entry, [&](const Tensor& parameter) {
        ++calls;
        ASSERT_TRUE(is_dtensor(parameter.grad()));
        torch::NoGradGuard no_grad;
        parameter.add_(parameter.grad(), -0.1);
        parameter.mutable_grad().reset();
      });
    }
    torch::optim::SGD optimizer(plain->parameters(), 0.1);
    for (int step = 1; step <= 3; ++step) {
      model(ones_batch()).pow(2).sum().backward();
      EXPECT_EQ(calls, 4 * step);
      optimizer.zero_grad();
      plain(ones_batch()).pow(2).sum().backward();
      optimizer.step();
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_FALSE(model->parameters()[i].grad().defined());
        EXPECT_TRUE(
            torch::allclose(full_value(model->parameters()[i]), plain->parameters()[i], 1e-5, 1e-6))
            << "step " << step << ", parameter " << i;
      }
    }
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

TEST_P(EntriesAsLeaves, ABackwardToMembersReducesTheirGradientsOnly) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const auto x = ones_batch() * (1.0 + static_cast<double>(rank));
    const auto loss = model->second(x).sum() + model->first(x).sum();
    loss.backward({}, /*retain_graph=*/false, /*create_graph=*/false,
                  std::vector<Tensor>{model->second->weight});
    const auto mean = static_cast<double>(world() + 1);  // two rows of 1 + rank
    EXPECT_TRUE(
        torch::allclose(full_gradient(model->second->parameters()[0]), torch::full({4, 4}, mean)));
    EXPECT_FALSE(model->second->parameters()[1].grad().defined());
    EXPECT_FALSE(model->first->parameters()[0].grad().defined());
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(EntriesAsLeaves, ABackwardToAMemberAndAnEntryIsAnErrorThatNamesTheWaysOut) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const auto loss = model(ones_batch()).sum();
    EXPECT_THAT(message_of([&] {
                  loss.backward(
                      {}, /*retain_graph=*/true, /*create_graph=*/false,
                      std::vector<Tensor>{model->second->weight, model->first->parameters()[0]});
                }),
                AllOf(HasSubstr("Registry entries"), HasSubstr("fsdp::grad")));
    EXPECT_FALSE(model->second->parameters()[0].grad().defined());
    loss.backward();
    EXPECT_TRUE(model->first->parameters()[0].grad().defined());
  });
}

// docs/from_pytorch.md: an entry is in no graph, and alone gets nothing.
TEST_P(EntriesAsLeaves, ABackwardToEntriesAloneBringsNothingAndTheNextOneIsRight) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto input_of = [](int64_t r) { return ones_batch() * (1.0 + static_cast<double>(r)); };
    Pair plain;
    for (int64_t r = 0; r < mesh.size(); ++r) plain(input_of(r)).pow(2).sum().backward();
    for (const size_t count : {1, 4}) {
      auto model = sharded(Pair(), mesh);
      const auto entries = model->parameters();
      const auto expect_the_mean = [&](const char* what) {
        for (size_t i = 0; i < entries.size(); ++i) {
          const auto mean = plain->parameters()[i].grad() / mesh.size();
          ASSERT_TRUE(entries[i].grad().defined()) << what << ", " << i;
          EXPECT_TRUE(torch::allclose(full_gradient(entries[i]), mean, 1e-5, 1e-6))
              << what << ", " << i;
        }
        EXPECT_EQ(counters(mesh).gradient_bytes, 0) << what;
        EXPECT_EQ(resident_bytes(counters(mesh)), 0) << what;
        model->zero_grad();
      };
      const auto loss = model(input_of(rank)).pow(2).sum();
      const auto reductions = counters(mesh).reduce_scatters;
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false,
                    std::vector<Tensor>(entries.begin(), entries.begin() + count));
      for (const auto& entry : entries) EXPECT_FALSE(entry.grad().defined());
      for (const auto& layer : {model->first, model->second}) {
        EXPECT_FALSE(layer->weight.grad().defined());
        EXPECT_FALSE(layer->bias.grad().defined());
      }
      EXPECT_EQ(counters(mesh).reduce_scatters, reductions);
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      loss.backward();
      expect_the_mean("the same graph");
      model(input_of(rank)).pow(2).sum().backward();
      expect_the_mean("the next step");
    }
  });
}

TEST_P(EntriesAsLeaves, GradientsOfEntriesAreTakenAsValues) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair plain;
    auto model = sharded(Pair(), mesh);
    const auto expected =
        torch::autograd::grad({plain(ones_batch()).sum()}, {plain->first->weight})[0];
    const auto actual = grad({model(ones_batch()).sum()}, {model->first->parameters()[0]})[0];
    EXPECT_FALSE(is_dtensor(actual));
    EXPECT_TRUE(torch::equal(actual, expected));
    EXPECT_FALSE(model->first->parameters()[0].grad().defined());
  });
}

// A loop that is cut off in the middle of an accumulation.
TEST_P(EntriesAsLeaves, ZeroGradDoesNotReachWhatWaitsAndZeroPendingGradientsDoes) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto gradient = [&](bool drop) {
      auto model = sharded(Pair(), mesh);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      {
        const NoSyncGuard no_sync(get_fsdp_module(*model));
        model(ones_batch()).sum().backward();
      }
      optimizer.zero_grad();
      if (drop) get_fsdp_module(*model).zero_pending_gradients();
      model(ones_batch()).sum().backward();
      return full_gradient(model->second->parameters()[0]);
    };
    EXPECT_TRUE(torch::allclose(gradient(/*drop=*/false), 2 * gradient(/*drop=*/true)));
  });
}

INSTANTIATE_WORLDS(EntriesAsLeaves, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
