// LibTorch's own optimizers and what programs do with them, over the entries of a sharded
// model, beside the same over a plain one.
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

namespace optim = torch::optim;
using torch::Tensor;

class Optimizers : public Worlds {};

struct NetImpl : torch::nn::Module {
  NetImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return last(torch::tanh(middle(torch::tanh(first(x))))); }
  torch::nn::Linear first = register_module("first", make_linear(7, 11)),
                    middle = register_module("middle", make_linear(11, 11)),
                    last = register_module("last", make_linear(11, 3));
};
TORCH_MODULE(Net);

// A whole training, which calls `backward` whenever it wants gradients of the step's data
// in `net`.
using TrainingRun = std::function<void(Net& net, const std::function<void(int step)>& backward)>;

Tensor input_of(int step, int64_t rank) {
  return torch::linspace(-1, 1, 14, torch::kDouble).view({2, 7}) * (1.0 + step) +
         0.25 * static_cast<double>(rank);
}

void expect_trains_alike(const DeviceMesh& mesh, const TrainingRun& train) {
  Net plain, sharded;
  for (auto* layer : {&sharded->first, &sharded->middle, &sharded->last}) fully_shard(*layer, mesh);
  fully_shard(sharded, mesh);
  const auto world = mesh.size();
  train(plain, [&](int step) {
    for (int64_t rank = 0; rank < world; ++rank)
      (plain(input_of(step, rank)).pow(2).sum() / static_cast<double>(world)).backward();
  });
  train(sharded, [&](int step) { sharded(input_of(step, mesh.rank())).pow(2).sum().backward(); });
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    const auto actual = full_value(sharded->parameters()[i]);
    EXPECT_TRUE(torch::allclose(actual, plain->parameters()[i], 1e-9, 1e-12))
        << "parameter " << i << " differs by " << (actual - plain->parameters()[i]).abs().max();
  }
}

template <class Optimizer, class Options>
TrainingRun steps_of(const Options& options) {
  return [options](Net& net, const auto& backward) {
    Optimizer optimizer(net->parameters(), options);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      backward(step);
      optimizer.step();
    }
  };
}

TEST_P(Optimizers, OfEveryKindTrainAlike) {
  using Named = std::pair<std::string, TrainingRun>;
  const std::vector<Named> kinds = {
      {"SGD", steps_of<optim::SGD>(optim::SGDOptions(0.01))},
      {"SGD, momentum and dampening",
       steps_of<optim::SGD>(optim::SGDOptions(0.01).momentum(0.9).dampening(0.3))},
      {"SGD, Nesterov", steps_of<optim::SGD>(optim::SGDOptions(0.01).momentum(0.9).nesterov(true))},
      {"Adam, AMSGrad", steps_of<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true).eps(1e-3))},
      {"AdamW", steps_of<optim::AdamW>(optim::AdamWOptions(0.01).weight_decay(0.1).eps(1e-3))},
      {"RMSprop, centred",
       steps_of<optim::RMSprop>(optim::RMSpropOptions(0.01).centered(true).eps(1e-3))},
      {"Adagrad", steps_of<optim::Adagrad>(optim::AdagradOptions(0.01).eps(1e-3))}};
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const auto& [name, training] : kinds) {
      SCOPED_TRACE(name);
      expect_trains_alike(mesh, training);
    }
  });
}

TEST_P(Optimizers, WithGroupsScheduleAndALateGroupTrainAlike) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_trains_alike(mesh, [](Net& net, const auto& backward) {
      std::vector<Tensor> decayed, others;  // no decay of biases
      for (const auto& item : net->first->named_parameters())
        (item.key() == "weight" ? decayed : others).push_back(item.value());
      std::vector<optim::OptimizerParamGroup> groups;
      groups.emplace_back(decayed, std::make_unique<optim::AdamWOptions>(
                                       optim::AdamWOptions(0.02).weight_decay(0.1).eps(1e-3)));
      groups.emplace_back(others, std::make_unique<optim::AdamWOptions>(
                                      optim::AdamWOptions(0.01).weight_decay(0).eps(1e-3)));
      optim::AdamW optimizer(groups, optim::AdamWOptions(0.01).eps(1e-3));
      optim::StepLR schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
      for (int step = 0; step < 5; ++step) {
        if (step == 2)
          optimizer.add_param_group(optim::OptimizerParamGroup(net->middle->parameters()));
        net->zero_grad();
        backward(step);
        optimizer.step();
        schedule.step();
      }
    });
  });
}

TEST_P(Optimizers, TwoOfDifferentKindShareAModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_trains_alike(mesh, [](Net& net, const auto& backward) {
      optim::SGD one(net->first->parameters(), optim::SGDOptions(0.02).momentum(0.5));
      auto rest = net->middle->parameters();
      for (const auto& parameter : net->last->parameters()) rest.push_back(parameter);
      optim::Adam two(rest, optim::AdamOptions(0.01).eps(1e-3));
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        backward(step);
        one.step();
        if (step % 2 == 1) two.step();
      }
    });
  });
}

TEST_P(Optimizers, WithLibTorchsClippingAndGradientsKeptInPlace) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      expect_trains_alike(mesh, [p](Net& net, const auto& backward) {
        optim::SGD optimizer(net->parameters(), 0.05);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad(/*set_to_none=*/false);
          backward(step);
          torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5, p);
          torch::nn::utils::clip_grad_value_(net->parameters(), 0.2);
          optimizer.step();
        }
      });
    });
  }
}

TEST_P(Optimizers, WhoseClosureRunsTheBackwardTrainAlikeAfterAnException) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_trains_alike(mesh, [](Net& net, const auto& backward) {
      optim::SGD optimizer(net->parameters(), 0.02);
      const auto step_with = [&](int step, bool fails) {
        optimizer.step([&] {
          optimizer.zero_grad();
          backward(step);
          if (fails) throw std::runtime_error("in the closure");
          return torch::zeros({});
        });
      };
      step_with(0, false);
      EXPECT_THROW(step_with(1, true), std::runtime_error);
      step_with(2, false);
    });
  });
}

// It flattens gradients and joins them, and gives each parameter its part of a direction.
TEST_P(Optimizers, OfSecondOrderTrainAlike) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_trains_alike(mesh, [](Net& net, const auto& backward) {
      const auto options =
          optim::LBFGSOptions(0.05).max_iter(3).history_size(2).tolerance_change(-1);
      optim::LBFGS optimizer(net->parameters(), options);
      for (int step = 0; step < 2; ++step) {
        optimizer.step([&] {
          optimizer.zero_grad();
          backward(step);
          return torch::zeros({}, torch::kDouble);
        });
      }
    });
  });
}

TEST_P(Optimizers, OutliveTheDtypeAndTheModelTheyWereMadeFor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_trains_alike(mesh, [](Net& net, const auto& backward) {
      optim::SGD optimizer(net->parameters(), 0.02);
      net->to(torch::kFloat);
      net->to(torch::kCPU);
      net->to(torch::kDouble);  // the values of single precision, in both models
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        backward(step);
        optimizer.step();
      }
    });
    auto model = std::make_unique<Net>();
    fully_shard(*model, mesh);
    optim::AdamW optimizer((*model)->parameters(), 0.1);
    (*model)->forward(input_of(0, 0)).sum().backward();
    model.reset();
    EXPECT_NO_THROW(optimizer.step()) << "the entries live as long as their optimizer";
    EXPECT_NO_THROW(optimizer.zero_grad());
  });
}

INSTANTIATE_WORLDS(Optimizers, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
