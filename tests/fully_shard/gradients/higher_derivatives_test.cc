// Derivatives beyond one backward: penalties on inputs, Hessian products, forwards and
// backwards in any order.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class Derivatives : public Worlds {};

struct CriticImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return out(torch::tanh(in(x))) + x; }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(16, 12));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(12, 16));
};
TORCH_MODULE(Critic);

using CriticLoss = std::function<Tensor(Critic&, const Data&)>;

BuildModel critic_with(const CriticLoss& loss) {
  return [loss]() -> Model {
    Critic critic;
    return {critic.ptr(), [critic, loss](const Data& data) mutable { return loss(critic, data); }};
  };
}

std::vector<std::pair<std::string, CriticLoss>> losses() {
  return {
      {"a penalty on the gradient of inputs",
       [](Critic& critic, const Data& data) {
         const auto x = data.x.clone().requires_grad_();
         const auto gradient =
             torch::autograd::grad({critic(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
         return critic(data.x).mean() + (gradient.norm(2, -1, /*keepdim=*/false) - 1).pow(2).mean();
       }},
      {"the gradient of inputs, then a backward of the same graph",
       [](Critic& critic, const Data& data) {
         const auto x = data.x.clone().requires_grad_();
         const auto loss = critic(x).pow(2).mean();
         const auto gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
         return loss + 0 * gradient.sum();
       }},
      {"a forward of its own output",
       [](Critic& critic, const Data& data) { return critic(critic(data.x)).pow(2).mean(); }},
      {"two forwards",
       [](Critic& critic, const Data& data) {
         const auto one = critic(data.x), two = critic(2 * data.x);
         return (two * one).mean();
       }},
      {"an evaluation under no_grad before backward",
       [](Critic& critic, const Data& data) {
         const auto loss = critic(data.x).pow(2).mean();
         torch::NoGradGuard no_grad;
         critic(data.x * 3);
         return loss;
       }},
      {"an evaluation in inference mode before backward",
       [](Critic& critic, const Data& data) {
         const auto loss = critic(data.x).pow(2).mean();
         c10::InferenceMode inference;
         critic(data.x * 3);
         return loss;
       }},
  };
}

TEST_P(Derivatives, InOneBackwardHaveTheUnshardedNumbers) {
  for (const auto& [name, loss] : losses()) {
    SCOPED_TRACE(name);
    expect_parity(world(), critic_with(loss), shard_children, name);
  }
}

// Runs backwards of its own on `critic`, and adds up gradients.
using Backwards = std::function<void(Critic&, const Data&)>;

std::vector<std::pair<std::string, Backwards>> backwards() {
  return {
      {"of two forwards in reverse order",
       [](Critic& critic, const Data& data) {
         const auto one = critic(data.x).pow(2).mean(), two = critic(2 * data.x).pow(2).mean();
         two.backward();
         one.backward();
       }},
      {"of two forwards in their order",
       [](Critic& critic, const Data& data) {
         const auto one = critic(data.x).pow(2).mean(), two = critic(2 * data.x).pow(2).mean();
         one.backward();
         two.backward();
       }},
      {"of one graph twice",
       [](Critic& critic, const Data& data) {
         const auto loss = critic(data.x).pow(2).mean();
         loss.backward({}, /*retain_graph=*/true);
         loss.backward();
       }},
      {"of a gradient of inputs after that of the loss",
       [](Critic& critic, const Data& data) {
         const auto x = data.x.clone().requires_grad_();
         const auto loss = critic(x).pow(2).mean();
         const auto gradient =
             torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
         loss.backward({}, /*retain_graph=*/true);
         gradient.pow(2).sum().backward();
       }},
  };
}

TEST_P(Derivatives, InSeveralBackwardsAddUpToTheUnshardedOnes) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (const auto& [name, run] : backwards()) {
      SCOPED_TRACE(name);
      const auto build = [] {
        Critic critic;
        critic->to(torch::kDouble);
        return Model{critic.ptr(), {}};
      };
      Critic plain(std::dynamic_pointer_cast<CriticImpl>(build_seeded(build).module)),
          sharded(std::dynamic_pointer_cast<CriticImpl>(build_seeded(build).module));
      shard_children(*sharded, mesh);
      const auto data_of = [](int64_t r) {
        auto data = make_data(static_cast<uint64_t>(r) + 3);
        data.x = data.x.to(torch::kDouble);
        return data;
      };
      for (int64_t r = 0; r < world(); ++r) run(plain, data_of(r));
      run(sharded, data_of(rank));
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_TRUE(torch::allclose(full_gradient(sharded->parameters()[i]),
                                    plain->parameters()[i].grad() / world(), 1e-9, 1e-12))
            << "parameter " << i;
      }
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    }
  });
}

// d/dp of <gradient, v>, with v the parameters themselves.
template <class Grad>
std::vector<Tensor> hessian_product(Critic& critic, const Data& data,
                                    const std::vector<Tensor>& parameters, const Grad& grad_of) {
  const auto first = grad_of(critic(data.x).pow(2).mean(), parameters, /*create_graph=*/true);
  auto product = torch::zeros({});
  for (size_t i = 0; i < first.size(); ++i)
    product = product + (first[i] * (static_cast<double>(i) + 0.5)).pow(2).sum();
  return grad_of(product, parameters, /*create_graph=*/false);
}

TEST_P(Derivatives, HessianProductsOfMembersAndOfEntriesAreThisRanksOwn) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto build = [] { return Model{Critic().ptr(), {}}; };
    Critic plain(std::dynamic_pointer_cast<CriticImpl>(build_seeded(build).module)),
        sharded(std::dynamic_pointer_cast<CriticImpl>(build_seeded(build).module));
    shard_children(*sharded, mesh);
    const auto data = make_data(static_cast<uint64_t>(rank));
    const auto torchs = [](const Tensor& y, const std::vector<Tensor>& x, bool create_graph) {
      return torch::autograd::grad({y}, x, {}, true, create_graph);
    };
    const auto ours = [](const Tensor& y, const std::vector<Tensor>& x, bool create_graph) {
      return grad({y}, x, {}, true, create_graph);
    };
    const auto expected = hessian_product(plain, data, plain->parameters(), torchs);
    const std::vector<Tensor> members = {sharded->in->weight, sharded->in->bias,
                                         sharded->out->weight, sharded->out->bias};
    const auto by_entries = hessian_product(sharded, data, sharded->parameters(), ours);
    const auto by_members = hessian_product(sharded, data, members, torchs);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(by_entries[i], expected[i])) << i;
      EXPECT_TRUE(torch::equal(by_members[i], expected[i])) << i;
      EXPECT_FALSE(sharded->parameters()[i].grad().defined()) << i;
    }
  });
}

INSTANTIATE_WORLDS(Derivatives, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
