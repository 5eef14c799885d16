// In-place operators that work on parts as they are: those that are not linear on terms
// of a sum, and those that change the shape.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace fsdp {
namespace {

using testing::expect_as_plain;
using testing::expect_same;
using testing::Problem;
using testing::run_ranks;
using testing::waves;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

at::Tensor numbers(const at::Tensor& like) {
  return at::arange(like.numel(), at::kFloat).view(like.sizes());
}

TEST(WrittenInPlace, TermsAreReducedWhereTheOperatorIsNotLinear) {
  expect_same({
      {"relu_", [](const auto& t) { return Tensors{t.clone().relu_()}; }},
      {"exp_", [](const auto& t) { return Tensors{t.clone().exp_()}; }},
      {"clamp_", [](const auto& t) { return Tensors{t.clone().clamp_(-1, 1)}; }},
      {"pow_", [](const auto& t) { return Tensors{t.clone().pow_(2)}; }},
      {"fill_", [](const auto& t) { return Tensors{t.clone().fill_(3)}; }},
      {"masked_fill_", [](const auto& t) { return Tensors{t.clone().masked_fill_(t > 0, 2)}; }},
      {"copy_", [](const auto& t) { return Tensors{t.clone().copy_(numbers(t))}; }},
      {"copy_ of a number", [](const auto& t) { return Tensors{t.clone().copy_(at::ones({}))}; }},
      {"twice", [](const auto& t) { return Tensors{t.clone().abs_().add_(1).log_()}; }},
      {"_foreach_exp_",
       [](const auto& t) {
         const Tensors list{t.clone(), t.mul(2)};
         at::_foreach_exp_(list);
         return list;
       }},
  });
}

TEST(WrittenInPlace, NumbersAreAddedToTermsOnce) {
  expect_same({
      {"add_",
       [](const auto& t) {
         return Tensors{t.clone().add_(1.5), t.sum().add_(1, 2)};
       }},
      {"sub_",
       [](const auto& t) {
         return Tensors{t.clone().sub_(1.5), t.mean().sub_(1)};
       }},
      {"add",
       [](const auto& t) {
         return Tensors{t.add(1.5), t.sub(2), at::rsub(t, 1)};
       }},
      {"of a mean",
       [](const auto& t) { return Tensors{t.square().mean(1, true).add_(1e-5).rsqrt()}; }},
  });
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor t = distribute_tensor(waves({4, 6}), mesh, {Shard{1}});
    const at::Tensor sum = t.sum();
    EXPECT_EQ(DTensor(sum.add(1)).placements(), Placements{Partial{}});  // nothing was sent
  });
}

TEST(WrittenInPlace, ShapesChangeAsThoseOfViews) {
  expect_same({
      {"t_",
       [](const auto& t) {
         return Tensors{t.clone().t_(), t.clone().t_().mul(2)};
       }},
      {"transpose_",
       [](const auto& t) { return Tensors{t.unsqueeze(0).clone().transpose_(0, 2)}; }},
      {"unsqueeze_", [](const auto& t) { return Tensors{t.clone().unsqueeze_(1)}; }},
      {"squeeze_",
       [](const auto& t) {
         return Tensors{t.unsqueeze(1).clone().squeeze_(1), t.unsqueeze(0).clone().squeeze_(),
                        t.narrow(0, 1, 1).clone().squeeze_(0),
                        t.narrow(1, 2, 1).clone().squeeze_()};
       }},
      {"written after it",
       [](const auto& t) { return Tensors{t.narrow(0, 1, 1).clone().squeeze_(0).mul_(2)}; }},
  });
}

TEST(WrittenInPlace, ShapesThatChangeHaveTheGradientsOfOneDevice) {
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({5, 4}, 0.3)}, [](const Tensors& t) {
                     at::Tensor y = t[0].mul(t[1]);
                     y.transpose_(0, 1).unsqueeze_(1);
                     return y.mul(t[1].t().unsqueeze(1)).squeeze(1);
                   }};
  });
  expect_as_plain([] {  // matmul squeezes its result in place
    return Problem{{waves({4}), waves({4, 3}, 0.3), waves({5, 3}, 0.2)}, [](const Tensors& t) {
                     return at::matmul(at::matmul(t[0], t[1]), t[2].t()).unsqueeze(0);
                   }};
  });
}

TEST(WrittenInPlace, QuantilesAreThoseOfOneDevice) {
  expect_same(
      {{"quantile",
        [](const auto& t) {
          return Tensors{at::quantile(t, 0.3), at::quantile(t, 0.5, 0), at::quantile(t, 0.9, 1)};
        }},
       {"nanquantile, several at once", [](const auto& t) {
          const at::Tensor shares = at::tensor({0.1F, 0.6F});
          const at::Tensor holes = t.masked_fill(t == t.max(), std::nan(""));
          return Tensors{at::nanquantile(t, 0.3), at::nanquantile(holes, shares, 0, true)};
        }}});
}

TEST(WrittenInPlace, QuantilesBringGradients) {
  testing::on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = waves({5, 4}).set_requires_grad(true);
    const at::Tensor cut =
        distribute_tensor(plain.detach(), mesh, {Shard{0}}).set_requires_grad(true);
    at::quantile(plain, 0.3, 0).sum().backward();
    at::quantile(cut, 0.3, 0).sum().backward();
    EXPECT_TRUE(at::allclose(testing::whole(cut.grad()), plain.grad()));
    EXPECT_EQ(DTensor(cut.grad()).placements(), DTensor(cut).placements());
  });
}

}  // namespace
}  // namespace fsdp
