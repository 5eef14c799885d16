// Ranks that do not train alike: an error on every rank, in time, that names what each of
// them did. Where they share memory forward gathers nothing, so it is the reductions that
// meet; over Gloo see one_rank_alone_test.cc. And what a rank without samples does
// instead.
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/slowdown.h"
#include "tests/support/start_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Layers of one size between a first and a last one; a caller chooses which it passes.
struct ExpertsImpl : torch::nn::Module {
  static constexpr int64_t kCount = 3, kWidth = 6;

  ExpertsImpl() {
    router = register_module("router", torch::nn::Linear(kWidth, kWidth));
    for (int64_t i = 0; i < kCount; ++i) {
      experts.push_back(torch::nn::Linear(kWidth, kWidth));
      register_module("expert" + std::to_string(i), experts.back());
    }
    head = register_module("head", torch::nn::Linear(kWidth, 1));
    set_start_values(*this);
    to(torch::kDouble);
  }
  // Through the experts of `used`, in that order.
  torch::Tensor forward(const torch::Tensor& x, const std::vector<size_t>& used = {0, 1, 2}) {
    auto hidden = torch::tanh(router(x));
    for (const auto each : used) hidden = hidden + torch::tanh(experts[each](hidden));
    return head(hidden);
  }
  // Each expert gets the rows with its number in `route`, which may be none.
  torch::Tensor routed(const torch::Tensor& x, const torch::Tensor& route) {
    const auto hidden = torch::tanh(router(x));
    auto sum = torch::zeros_like(hidden);
    for (int64_t i = 0; i < kCount; ++i) {
      const auto rows = (route == i).nonzero().flatten();
      sum = sum.index_add(0, rows, experts[static_cast<size_t>(i)](hidden.index_select(0, rows)));
    }
    return head(sum);
  }

  torch::nn::Linear router = nullptr, head = nullptr;
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

// Every layer and the root as units.
Experts sharded_experts(const DeviceMesh& mesh) {
  Experts model;
  for (const auto& child : model->children()) fully_shard(*child, mesh);
  fully_shard(model, mesh);
  return model;
}

torch::Tensor input_of(int64_t rank, int64_t samples = 3) {
  return torch::linspace(-1, 1, samples * ExpertsImpl::kWidth, torch::kDouble)
             .view({samples, ExpertsImpl::kWidth}) +
         0.1 * static_cast<double>(rank);
}

void expect_same_gradients(Experts& plain, Experts& sharded) {
  const auto entries = sharded->named_parameters();
  for (const auto& item : plain->named_parameters()) {
    ASSERT_TRUE(entries[item.key()].grad().defined()) << item.key();
    EXPECT_TRUE(
        torch::allclose(full_gradient(entries[item.key()]), item.value().grad(), 1e-9, 1e-12))
        << item.key();
  }
}

class UnlikeRanks : public Worlds {
 protected:
  // `body`, which is not the same on all ranks, throws on all of them.
  void expect_named(const std::function<void(int64_t rank, const DeviceMesh& mesh)>& body,
                    const ::testing::Matcher<const std::string&>& matcher) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THAT(message_of([&] { body(rank, mesh); }), matcher) << "rank " << rank;
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(10));
    });
  }
};

TEST_P(UnlikeRanks, ExpertsOfEachRanksOwnAreNamed) {
  expect_named(
      [](int64_t rank, const DeviceMesh& mesh) {
        auto model = sharded_experts(mesh);
        model->forward(input_of(rank), {static_cast<size_t>(rank % 2)}).sum().backward();
      },
      AllOf(HasSubstr("out of order"), HasSubstr("reduce-scatter of unit 'expert0'"),
            HasSubstr("reduce-scatter of unit 'expert1'")));
}

TEST_P(UnlikeRanks, UnitsInAnotherOrderOnEachRankAreNamed) {
  expect_named(
      [](int64_t rank, const DeviceMesh& mesh) {
        auto model = sharded_experts(mesh);
        const auto used = rank == 0 ? std::vector<size_t>{0, 1, 2} : std::vector<size_t>{0, 2, 1};
        model->forward(input_of(rank), used).sum().backward();
      },
      AllOf(HasSubstr("out of order"), HasSubstr("unit 'expert1'"), HasSubstr("unit 'expert2'")));
}

TEST_P(UnlikeRanks, AnotherNumberOfMicroBatchesIsNamed) {
  expect_named(
      [](int64_t rank, const DeviceMesh& mesh) {
        auto model = sharded_experts(mesh);
        for (int64_t batch = 0; batch <= (rank == 0 ? 1 : 0); ++batch)
          model->forward(input_of(rank)).sum().backward();
        const torch::NoGradGuard no_grad;
        for (const auto& entry : model->parameters()) entry.sub_(entry.grad());
        model->forward(input_of(rank)).sum().item<double>();
        internal::collectives_of(mesh, 0).barrier("end of the program");
      },
      AllOf(HasSubstr("reduce-scatter of unit 'head'"),
            HasSubstr("read of the shards of unit 'router'")));
}

// What one rank does otherwise, in a step of its own.
enum class Fault { kSkipsStep, kWritesAlone, kThrowsInBackward, kRunsNoBackward, kTrainsLess };

void step_with(Fault fault, Experts& model, torch::optim::Optimizer& optimizer, int64_t rank,
               bool is_mine) {
  if (is_mine && fault == Fault::kWritesAlone) {
    const torch::NoGradGuard no_grad;
    model->head->parameters()[0].mul_(2);
  }
  for (auto& parameter : model->head->parameters())
    parameter.requires_grad_(!is_mine || fault != Fault::kTrainsLess);
  if (!is_mine || fault != Fault::kRunsNoBackward) {
    auto loss = model->forward(input_of(rank)).sum();
    if (is_mine && fault == Fault::kThrowsInBackward) {
      loss.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "has thrown"); });
      message_of([&] { loss.backward(); });
    } else {
      loss.backward();
    }
  }
  if (!is_mine || fault != Fault::kSkipsStep) optimizer.step();
  optimizer.zero_grad();
}

// After the fault all ranks go on as if nothing had been, until they hear of it.
TEST_P(UnlikeRanks, EachFaultOfOneRankIsAnErrorOnAll) {
  for (const auto fault : {Fault::kSkipsStep, Fault::kWritesAlone, Fault::kThrowsInBackward,
                           Fault::kRunsNoBackward, Fault::kTrainsLess}) {
    const auto number = static_cast<int64_t>(fault);
    SCOPED_TRACE("fault " + std::to_string(number));
    expect_named(
        [&](int64_t rank, const DeviceMesh& mesh) {
          auto model = sharded_experts(mesh);
          torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
          for (int64_t step = 0; step < 4; ++step)
            step_with(fault, model, optimizer, rank, step == 1 && rank == number % world());
          internal::collectives_of(mesh, 0).barrier("end of the program");
        },
        AllOf(HasSubstr("rank "), HasSubstr("unit '")));
  }
}

// It waits elsewhere for the others, and they for it.
TEST_P(UnlikeRanks, ARankThatRunsNoBackwardIsNamedByWhatItWaitsIn) {
  expect_named(
      [](int64_t rank, const DeviceMesh& mesh) {
        auto model = sharded_experts(mesh);
        const auto loss = model->forward(input_of(rank)).sum();
        if (rank != 1) loss.backward();
        internal::collectives_of(mesh, 0).barrier("the user's own barrier");
      },
      AllOf(HasSubstr("reduce-scatter of unit 'head'"), HasSubstr("own barrier")));
}

INSTANTIATE_WORLDS(UnlikeRanks, 2, 3, 4);

// By the number of ranks, and over which transport: FSDP_PEER_MEMORY.
class AlikeRanks : public ::testing::TestWithParam<std::tuple<int64_t, const char*>> {
 protected:
  int64_t world() const { return std::get<0>(GetParam()); }
  void on_ranks(const std::function<void(int64_t rank, const DeviceMesh& mesh)>& body) const {
    on_ranks_of(world(), body);
  }

 private:
  const WithEnvironment transport_{"FSDP_PEER_MEMORY", std::get<1>(GetParam())};
};

// The line that docs/launching.md has for it: an empty batch.
TEST_P(AlikeRanks, ARankWithoutSamplesRunsAnEmptyBatch) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Experts plain, model = sharded_experts(mesh);
    torch::optim::SGD of_plain(plain->parameters(), 0.1), of_model(model->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      of_plain.zero_grad(), of_model.zero_grad();
      const auto samples = [&](int64_t each) { return each == step % world() ? 0 : 2 + each; };
      for (int64_t each = 0; each < world(); ++each) {
        if (samples(each) != 0)
          (plain->forward(input_of(each, samples(each))).pow(2).sum() / world()).backward();
      }
      model->forward(input_of(rank, samples(rank))).pow(2).sum().backward();
      expect_same_gradients(plain, model);
      of_plain.step(), of_model.step();
    }
  });
}

// Every expert is used on every rank, with no rows where none are its own.
TEST_P(AlikeRanks, AnExpertWithoutRowsRunsThemAllTheSame) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Experts plain, model = sharded_experts(mesh);
    const auto route_of = [](int64_t rank) {
      return torch::full({3}, rank % ExpertsImpl::kCount, torch::kLong);
    };
    for (int64_t each = 0; each < world(); ++each)
      (plain->routed(input_of(each), route_of(each)).pow(2).sum() / world()).backward();
    if (world() < ExpertsImpl::kCount) {  // the plain one leaves those that nobody used out
      for (auto& parameter : plain->experts.back()->parameters())
        parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    model->routed(input_of(rank), route_of(rank)).pow(2).sum().backward();
    expect_same_gradients(plain, model);
  });
}

// Nor of a model that has gone is anything left for the next one on the process group.
TEST_P(AlikeRanks, ABackwardThatThrowsOnAllRanksLeavesNothing) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (int64_t number = 0; number < 3; ++number) {
      Experts plain, model = sharded_experts(mesh);
      get_fsdp_module(*model).set_is_last_backward(false);
      model->forward(input_of(rank + 5)).pow(2).sum().backward();
      auto hidden = torch::tanh(model->router(input_of(rank)));
      hidden.register_hook([](const torch::Tensor&) { throw std::runtime_error("of the user"); });
      hidden = model->experts[0](hidden);
      EXPECT_THAT(message_of([&] { model->head(hidden).sum().backward(); }),
                  HasSubstr("of the user"));
      if (number == 1) continue;
      get_fsdp_module(*model).set_is_last_backward(true);
      for (int64_t each = 0; each < world(); ++each)
        (plain->forward(input_of(each)).pow(2).sum() / world()).backward();
      model->forward(input_of(rank)).pow(2).sum().backward();
      expect_same_gradients(plain, model);
    }
  });
}

// What is on the way is bounded, and by no clock. The first step gathers nothing ahead.
TEST_P(AlikeRanks, PeaksDoNotDependOnTiming) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded_experts(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    std::vector<int64_t> peaks;
    for (int64_t number = 0; number <= world(); ++number) {
      reset_peak(mesh);
      if (rank == number) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      model->forward(input_of(rank)).pow(2).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      peaks.push_back(counters(mesh).peak_bytes);
    }
    for (size_t step = 2; step < peaks.size(); ++step) EXPECT_EQ(peaks[step], peaks[1]);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, AlikeRanks,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values("on", "off")),
                         [](const auto& info) {
                           return "World" + std::to_string(std::get<0>(info.param)) +
                                  (std::string("on") == std::get<1>(info.param) ? "PeerMemory"
                                                                                : "Gloo");
                         });

}  // namespace
}  // namespace fsdp::testing
