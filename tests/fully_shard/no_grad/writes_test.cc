// Writes to members and registry entries: every form reaches the shards, ranks that write
// different values are told, and views of registry entries stand for themselves.
#include "tests/fully_shard/support/bit_equality.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <ATen/ops/_foreach_copy.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using torch::indexing::Slice;

// One way to write to members, under no_grad.
Case writing(std::string name, std::vector<std::vector<int64_t>> parameters,
             std::function<void(const Tensors&, Random&)> write) {
  return {std::move(name), shapes(std::move(parameters)),
          [write](const Tensors& w, Random& random) -> Tensors {
            {
              torch::NoGradGuard no_grad;
              write(w, random);
            }
            auto loss = torch::zeros({});
            for (const auto& parameter : w)
              loss = loss + parameter.pow(2).sum();  // the gradient sees what was written
            loss.backward();
            return {loss};
          }};
}

std::vector<Case> writes() {
  return {
      writing("detach and data", {{6, 4}},
              [](const Tensors& w, Random&) {
                w[0].detach().mul_(3);
                w[0].data().add_(1);
                w[0].variable_data().clamp_(0, 0.5);
              }),
      writing("through views", {{6, 4}},
              [](const Tensors& w, Random& random) {
                w[0].slice(0, 0, 2).zero_();
                w[0].select(0, 3).fill_(2);
                w[0].t()[1].mul_(3);
                w[0].view(-1).narrow(0, 3, 4).copy_(random({4}));
                w[0].as_strided({2, 2}, {4, 1}, 3).fill_(5);
                w[0].diagonal().add_(1);
                w[0].index({Slice(1, 3), Slice()}) = random({2, 4});
              }),
      writing("a view of a view kept over other operators", {{6, 4}, {3}},
              [](const Tensors& w, Random&) {
                auto row = w[0].detach().slice(0, 1, 5).t()[2];
                w[1].sum();
                row.fill_(7);
              }),
      writing("by index", {{6, 4}},
              [](const Tensors& w, Random& random) {
                w[0].index_put_({torch::tensor({4, 1})}, random({2, 4}));
                w[0].index_put_({torch::tensor({0, 0})}, random({2, 4}), /*accumulate=*/true);
                w[0].masked_fill_(torch::eye(6, 4).to(torch::kBool), 7);
                w[0].scatter_(0, torch::zeros({1, 4}, torch::kLong), random({1, 4}));
                w[0].index_add_(0, torch::tensor({1}), random({1, 4}));
                w[0].index_copy_(0, torch::tensor({2}), random({1, 4}));
              }),
      writing("copy_", {{4, 4}},
              [](const Tensors& w, Random& random) {
                w[0].copy_(w[0].flip(0));
                w[0].t().copy_(random({4, 4}));
                w[0][1].copy_(random({4}).to(torch::kDouble));
              }),
      writing("results by out", {{4, 4}},
              [](const Tensors& w, Random& random) {
                auto out = w[0];
                const auto a = random({4, 4});
                at::mm_out(out, out, a);
                at::add_out(out, out, a, 2);
                at::sum_out(out, random({3, 4, 4}), {0});
                at::cat_out(out, {a.narrow(0, 0, 2), out.narrow(0, 0, 2).clone()});
                at::sigmoid_out(out, out);
                auto row = out[2];
                at::mul_out(row, a[0], a[1]);
              }),
      writing("foreach", {{4, 4}, {3}},
              [](const Tensors& w, Random& random) {
                at::_foreach_add_(w, {random({4, 4}), random({3})}, 0.5);
                at::_foreach_copy_(w, {random({4, 4}), random({3})});
                at::_foreach_mul_({w[0].detach(), w[1].narrow(0, 0, 2)}, 2);
              }),
      writing("fused optimizer kernels", {{4, 4}, {3}},
              [](const Tensors& w, Random& random) {
                const Tensors gradients{random({4, 4}), random({3})};
                const Tensors first{torch::zeros({4, 4}), torch::zeros({3})},
                    second{torch::zeros({4, 4}), torch::zeros({3})};
                const Tensors steps{torch::ones({}), torch::ones({})};
                at::_fused_adamw_(w, gradients, first, second, {}, steps, 1e-2, .9, .99, .1, 1e-8,
                                  false, false);
                at::_fused_sgd_(w, gradients, {}, .1, 0, .1, 0, false, false, true);
              }),
      writing("initialisers", {{4, 4}, {4}, {4, 4}},
              [](const Tensors& w, Random&) {
                torch::nn::init::constant_(w[1], 3);
                torch::nn::init::eye_(w[0]);
                torch::nn::init::zeros_(w[2]);
                torch::nn::init::ones_(w[2].narrow(0, 1, 2));
              }),
      writing("value ranges", {{4, 4}, {4}},
              [](const Tensors& w, Random&) {
                torch::nn::utils::clip_grad_norm_(w, 1.0);  // no gradients yet: nothing
                w[0].sub_(1).div_(3).pow_(2).sqrt_().nan_to_num_();
                w[1].clamp_(-0.5, 0.5).t();
                w[1].relu_();
              }),
      {"stock optimizers on members", shapes({{4, 4}, {4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::optim::AdamW adam(w, 1e-2);
         torch::optim::SGD sgd(w, torch::optim::SGDOptions(0.1).momentum(0.9));
         const auto x = random({3, 4});
         Tensors losses;
         for (int step = 0; step < 3; ++step) {
           const auto loss = torch::linear(x, w[0], w[1]).pow(2).sum();
           const auto gradients = torch::autograd::grad({loss}, w);
           // As an optimizer that keeps gradients of its own: members' gradients are on
           // the registry entries.
           for (size_t i = 0; i < w.size(); ++i) w[i].mutable_grad() = gradients[i];
           adam.step();
           sgd.step();
           for (const auto& parameter : w) parameter.mutable_grad().reset();
           losses.push_back(loss);
         }
         return losses;
       }},
  };
}

class InterceptionWrites : public ::testing::TestWithParam<Case> {};

TEST_P(InterceptionWrites, ToMembersReachTheShards) {
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(GetParam(), world);
}

INSTANTIATE_TEST_SUITE_P(Members, InterceptionWrites, ::testing::ValuesIn(writes()),
                         [](const auto& info) { return test_name(info.param.name); });

class InterceptionWritesOnWorlds : public Worlds {
 protected:
  // With groups left unsharded, as a program would find them.
  void on_ranks(Tensors (*parameters)(Random&),
                const std::function<void(int64_t, Cells&)>& body) const {
    run_ranks(world(), [&](int64_t rank) {
      Random random;
      auto cells = std::make_shared<Cells>(parameters(random));
      cells->shard(init_device_mesh(torch::kCPU, {world()}));
      body(rank, *cells);
    });
  }
};

TEST_P(InterceptionWritesOnWorlds, ThatDifferBetweenRanksAreAnErrorWithTheNameAtTheNextGather) {
  const auto parameters = [](Random& random) { return Tensors{random({6, 4}), random({2})}; };
  on_ranks(parameters, [&](int64_t rank, Cells& cells) {
    const auto weight = cells.members()[0];
    torch::NoGradGuard no_grad;
    torch::nn::init::constant_(weight, static_cast<double>(rank));
    const auto later = [&] {
      cells.members()[1].sum();  // another unit
      weight.sum();
    };
    if (world() == 1) return later();
    EXPECT_THAT(message_of(later), HasSubstr("'cell0.weight'"));
  });
}

TEST_P(InterceptionWritesOnWorlds, AWriteToAMemberIsSeenByTheEntryAtOnce) {
  const auto parameters = [](Random& random) { return Tensors{random({6, 4})}; };
  on_ranks(parameters, [](int64_t, Cells& cells) {
    torch::NoGradGuard no_grad;
    cells.members()[0].fill_(3);
    EXPECT_TRUE(torch::equal(full_value(cells.entries()[0]), torch::full({6, 4}, 3.F)));
    cells.members()[0].slice(0, 0, 2).zero_();
    EXPECT_EQ(DTensor(cells.entries()[0]).full_tensor().sum().item<float>(), 48);
    cells.members()[0].fill_(1);
    EXPECT_EQ(DTensor(cells.entries()[0].sum()).full_tensor().item<float>(), 24);
    cells.members()[0].fill_(2);
    EXPECT_TRUE((DTensor(cells.entries()[0]).to_local() == 2).all().item<bool>());
  });
}

TEST_P(InterceptionWritesOnWorlds, AWriteToAnEntryIsSeenByTheMemberAtOnce) {
  const auto parameters = [](Random& random) { return Tensors{random({6, 4})}; };
  on_ranks(parameters, [](int64_t, Cells& cells) {
    torch::NoGradGuard no_grad;
    const auto weight = cells.members()[0];
    weight.sum();
    cells.entries()[0].fill_(3);
    EXPECT_EQ(weight.sum().item<float>(), 72);
    cells.entries()[0].detach().mul_(2);
    EXPECT_EQ(weight.sum().item<float>(), 144);
    weight.add_(1);
    cells.entries()[0].mul_(2);
    EXPECT_EQ(weight.sum().item<float>(), 14 * 24);
  });
}

TEST_P(InterceptionWritesOnWorlds, EntriesAndTheirViewsAreDifferentiableLikeTheParameter) {
  EvictAfterEveryOperator evict;
  const auto parameters = [](Random& random) { return Tensors{random({6, 4})}; };
  const std::vector<std::function<Tensor(const Tensor&)>> losses{
      [](const Tensor& p) { return p.view(-1).pow(2).sum(); },
      [](const Tensor& p) { return p.slice(0, 0, 2).pow(2).sum(); },
      [](const Tensor& p) { return p.t().pow(3).sum(); },
      [](const Tensor& p) { return p.t().slice(0, 1, 3).exp().sum(); },
      [](const Tensor& p) { return p.index({Slice(1, 3)}).sum() + p.select(1, 2).pow(2).sum(); },
      [](const Tensor& p) {
        return torch::linear(torch::ones({2, 4}), p).pow(2).sum();
      },
  };
  on_ranks(parameters, [&](int64_t, Cells& cells) {
    for (size_t i = 0; i < losses.size(); ++i) {
      const auto plain = cells.members()[0].detach().clone().requires_grad_();
      const auto expected = losses[i](plain);
      expected.backward();
      const auto loss = losses[i](cells.entries()[0]);
      EXPECT_TRUE(same_bits(loss.detach(), expected.detach())) << i;
      loss.backward();
      EXPECT_TRUE(torch::allclose(full_value(cells.entries()[0].grad()), plain.grad(), 1e-6)) << i;
      cells.entries()[0].mutable_grad().reset();
    }
  });
}

TEST_P(InterceptionWritesOnWorlds, ADetachedEntryIsALeafOfItsOwn) {
  const auto parameters = [](Random& random) { return Tensors{random({6, 4})}; };
  on_ranks(parameters, [](int64_t, Cells& cells) {
    const auto entry = cells.entries()[0];
    const auto copy = entry.detach().requires_grad_();
    const auto loss = copy.mul(copy).sum();
    ASSERT_TRUE(is_dtensor(loss));
    loss.backward();
    EXPECT_FALSE(entry.grad().defined());
    ASSERT_TRUE(is_dtensor(copy.grad()));
    EXPECT_TRUE(torch::equal(full_value(copy.grad()), full_value(entry) * 2));
    const auto row = entry.detach().t().requires_grad_();
    EXPECT_EQ((row * 1).sizes(), at::IntArrayRef({4, 6})) << "a view stands for itself";
  });
}

INSTANTIATE_WORLDS(InterceptionWritesOnWorlds, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
