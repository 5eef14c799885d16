// Losses and layers of images that run on parts: values and gradients are those of one
// device, and nothing moves.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp {
namespace {

using testing::expect_as_plain;
using testing::on_worlds;
using testing::Problem;
using testing::waves;
using testing::whole;

struct OnOneTensor {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x)> function;
};

// Of every element of function(x) another share.
at::Tensor weighted_sum(const at::Tensor& result) {
  return result.mul(waves(result.sizes().vec(), 0.37)).sum();
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(actual.sizes() == expected.sizes() && actual.allclose(expected, 1e-12, 1e-12))
      << actual << expected;
}

void expect_on_parts(const OnOneTensor& test, const at::Tensor& values, const DeviceMesh& mesh,
                     const Placement& placement) {
  SCOPED_TRACE(test.name + " " + to_string(placement) + " of " + std::to_string(mesh.size()));
  const at::Tensor plain = values.detach().clone().set_requires_grad(true);
  const at::Tensor leaf = distribute_tensor(values, mesh, {placement}).set_requires_grad(true);
  std::string moved;
  const auto found = [&] {
    const internal::CommListener listener(
        [&](const internal::CommEvent& event) { moved += event.operator_name + " "; });
    at::Tensor result = test.function(leaf);
    weighted_sum(result).backward();
    return result;
  }();
  const at::Tensor wanted = test.function(plain);
  weighted_sum(wanted).backward();
  EXPECT_EQ(moved, "");
  expect_close(whole(found), wanted);
  expect_close(whole(leaf.grad()), plain.grad());
}

// Of `values` cut so, on worlds of 1, 2 and 3.
void expect_on_parts(const std::vector<OnOneTensor>& tests, const at::Tensor& values,
                     const std::vector<Placement>& placements) {
  on_worlds([&](const DeviceMesh& mesh) {
    for (const auto& test : tests) {
      for (const Placement& placement : placements) expect_on_parts(test, values, mesh, placement);
    }
  });
}

constexpr at::Reduction::Reduction kReductions[] = {at::Reduction::None, at::Reduction::Mean,
                                                    at::Reduction::Sum};

// With a target of their own.
std::vector<OnOneTensor> elementwise_losses() {
  const auto target = [](const at::Tensor& x) { return x.detach().mul(0.5).cos(); };
  const auto likely = [=](const at::Tensor& x) { return target(x).sigmoid(); };
  std::vector<OnOneTensor> losses;
  for (const int64_t reduction : kReductions) {
    const auto add = [&](const std::string& name, const auto& loss) {
      losses.push_back({name + " " + std::to_string(reduction), loss});
    };
    add("mse", [=](const auto& x) { return at::mse_loss(x, target(x), reduction); });
    add("smooth l1",
        [=](const auto& x) { return at::smooth_l1_loss(x, target(x), reduction, 0.3); });
    add("huber", [=](const auto& x) { return at::huber_loss(x, target(x), reduction, 0.3); });
    add("soft margin",
        [=](const auto& x) { return at::soft_margin_loss(x, target(x).sign(), reduction); });
    for (const auto& weight : {at::Tensor(), waves({4}, 0.9).abs()}) {
      add("cross entropy", [=](const auto& x) {
        return at::binary_cross_entropy(x.sigmoid(), likely(x), weight, reduction);
      });
      add("cross entropy with logits", [=](const auto& x) {
        return at::binary_cross_entropy_with_logits(x, likely(x), weight, weight, reduction);
      });
    }
  }
  return losses;
}

TEST(OperatorsOnParts, LossesOfElements) {
  const std::vector<Placement> placements{Replicate{}, Shard{0}, Shard{1},
                                          Shard{.dim = 1, .outer = 2}};
  expect_on_parts(elementwise_losses(), waves({5, 4}), placements);
  expect_on_parts(elementwise_losses(), waves({1, 4}), placements);
}

TEST(OperatorsOnParts, LossesOfElementsInAnyPlacement) {
  for (const int64_t reduction : kReductions) {
    expect_as_plain([=] {
      return Problem{{waves({5, 4}), waves({5, 4}, 0.3)}, [=](const auto& t) {
                       return at::mse_loss(t[0], t[1], reduction)
                           .add(at::huber_loss(t[0], t[1], reduction, 0.3))
                           .mul(at::smooth_l1_loss(t[0], t[1], reduction, 0.2));
                     }};
    });
    expect_as_plain([=] {
      return Problem{{waves({5, 4}), waves({5, 4}, 0.3), waves({4}, 0.2)}, [=](const auto& t) {
                       const at::Tensor weight = t[2].detach().abs();
                       return at::binary_cross_entropy(t[0].sigmoid(), t[1].sigmoid(), weight,
                                                       reduction)
                           .add(at::binary_cross_entropy_with_logits(t[0], t[1].sigmoid(), {},
                                                                     weight, reduction));
                     }};
    });
  }
}

// Averages of many, of which the sum is beyond half precision.
TEST(OperatorsOnParts, AveragesInHalfPrecisionDoNotOverflow) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::full({300, 4}, 20.0, at::kHalf);
    const at::Tensor rows = distribute_tensor(plain, mesh, {Shard{0}});
    EXPECT_EQ(at::mse_loss(rows, at::zeros_like(rows)).item<double>(), 400);
  });
}

// On no rank, although the parts of one would fit each other.
TEST(OperatorsOnParts, ShapesThatDoNotFitAreRefusedOnEveryRank) {
  on_worlds([](const DeviceMesh& mesh) {
    for (const int64_t rows : {2, 3}) {
      const at::Tensor a = distribute_tensor(waves({5, 4}), mesh, {Shard{0}});
      const at::Tensor b = distribute_tensor(waves({rows, 4}), mesh, {Shard{0}});
      EXPECT_THROW(a.add(b), c10::Error);
      EXPECT_THROW(at::mse_loss(a, b), c10::Error);
      EXPECT_THROW(at::binary_cross_entropy(a, b), c10::Error);
      EXPECT_THROW(at::binary_cross_entropy(a, waves({1, 4}).abs()), c10::Error);
    }
  });
}

TEST(OperatorsOnParts, Activations) {
  const at::Tensor slopes = at::tensor({0.1, 0.2, 0.3, 0.4}, at::kDouble);
  const OnOneTensor log_sigmoid{"log_sigmoid", [](const auto& x) { return at::log_sigmoid(x); }};
  const OnOneTensor prelu{"prelu", [=](const auto& x) { return at::prelu(x, slopes); }};
  const auto glu = [](int64_t dim) {
    return OnOneTensor{"glu", [=](const auto& x) { return at::glu(x, dim); }};
  };
  for (const int64_t rows : {5, 1}) {
    expect_on_parts({log_sigmoid, prelu}, waves({rows, 4}), {Replicate{}, Shard{0}, Shard{1}});
    expect_on_parts({glu(1), glu(-1)}, waves({rows, 4}), {Shard{0}});
  }
  expect_on_parts({glu(0)}, waves({6, 4}), {Shard{1}});
  expect_on_parts({glu(1)}, waves({3, 20}),
                  {Shard{.dim = 1, .outer = 2}, Shard{.dim = 1, .outer = 2, .unit = 5}});
  expect_on_parts({glu(1)}, waves({3, 24}),
                  {Shard{.dim = 1, .outer = 4}, Shard{.dim = 1, .outer = 4, .unit = 2}});
}

TEST(OperatorsOnParts, ActivationsInAnyPlacement) {
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({4}, 0.3)},
                   [](const auto& t) { return at::prelu(t[0], t[1]).mul(at::log_sigmoid(t[0])); }};
  });
  for (const int64_t dim : {0, 1}) {
    expect_as_plain([=] {
      return Problem{{waves({6, 8})}, [=](const auto& t) { return at::glu(t[0], dim); }};
    });
  }
}

struct NormOfImages {
  at::Tensor weight = waves({6}, 0.3), bias = waves({6}, 0.2), mean = waves({6}, 0.1);
  at::Tensor variance = waves({6}, 0.4).square().add(0.5);

  at::Tensor batch_norm(const at::Tensor& x) const {
    return at::batch_norm(x, weight, bias, mean, variance, /*training=*/false, 0.1, 1e-5, false);
  }
  // Of statistics that are not kept.
  at::Tensor batch_norm_in_training(const at::Tensor& x) const {
    return at::batch_norm(x, weight, bias, {}, {}, /*training=*/true, 0.1, 1e-5, false);
  }
  at::Tensor group_norm(const at::Tensor& x) const { return at::group_norm(x, 3, weight, bias); }
};

TEST(OperatorsOnParts, ViewsOfComplexNumbers) {
  expect_on_parts({{"real pairs as complex numbers and back",
                    [](const at::Tensor& x) { return at::view_as_real(at::view_as_complex(x)); }}},
                  waves({5, 3, 2}), {Shard{0}, Shard{1}});
}

TEST(OperatorsOnParts, NormsOfImages) {
  const NormOfImages norm;
  const OnOneTensor batch_norm{"batch norm", [=](const auto& x) { return norm.batch_norm(x); }};
  const OnOneTensor training{"batch norm in training",
                             [=](const auto& x) { return norm.batch_norm_in_training(x); }};
  const OnOneTensor group_norm{"group norm", [=](const auto& x) { return norm.group_norm(x); }};
  for (const int64_t rows : {3, 5})
    expect_on_parts({batch_norm, group_norm}, waves({rows, 6, 2, 2}), {Replicate{}, Shard{0}});
  expect_on_parts({group_norm}, waves({1, 6, 2, 2}), {Shard{0}});
  expect_on_parts({batch_norm, training}, waves({3, 6, 2, 2}),
                  {Shard{1}, Shard{.dim = 1, .unit = 2}, Shard{.dim = 1, .outer = 2}});
  expect_on_parts({group_norm}, waves({3, 6, 2, 2}), {Shard{.dim = 1, .unit = 2}});
}

TEST(OperatorsOnParts, NormsOfImagesInAnyPlacement) {
  const auto inputs = [] {
    return std::vector<at::Tensor>{waves({5, 4, 3}), waves({4}, 0.3), waves({4}, 0.2)};
  };
  for (const int64_t groups : {1, 2, 4}) {
    expect_as_plain([=] {
      return Problem{inputs(),
                     [=](const auto& t) { return at::group_norm(t[0], groups, t[1], t[2]); }};
    });
  }
  const at::Tensor mean = waves({4}, 0.1), variance = mean.square().add(0.5);
  for (const bool is_training : {false, true}) {
    expect_as_plain([=] {
      return Problem{inputs(), [=](const auto& t) {
                       return at::batch_norm(t[0], t[1], t[2], mean.clone(), variance.clone(),
                                             is_training, 0.1, 1e-5, false);
                     }};
    });
    expect_as_plain([=] {
      return Problem{inputs(), [=](const auto& t) {
                       return at::batch_norm(t[0], t[1], {}, {}, {}, /*training=*/true, 0.1, 1e-5,
                                             false);
                     }};
    });
  }
}

// As CUDA does it: the statistics of an evaluation are those that it normalised with.
// They are empty where this machine's kernel gives them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> evaluate_and_keep_statistics(
    const at::Tensor& x, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool /*training*/, double /*momentum*/,
    double epsilon) {
  const at::Tensor inverse = variance->add(epsilon).rsqrt();
  const auto per_channel = [](const at::Tensor& t) { return t.view({1, -1, 1, 1}); };
  at::Tensor result = x.sub(per_channel(*mean)).mul(per_channel(inverse));
  result = result.mul(per_channel(*weight)).add(per_channel(*bias));
  return {result, mean->clone(), inverse};
}

void expect_the_kernels_statistics(const NormOfImages& norm) {
  const auto evaluate = [&](const at::Tensor& x) {
    return at::native_batch_norm(x, norm.weight, norm.bias, norm.mean, norm.variance,
                                 /*training=*/false, 0.1, 1e-5);
  };
  const std::vector<Placement> placements{Replicate{}, Shard{0}, Shard{1},
                                          Shard{.dim = 1, .unit = 2}};
  const at::Tensor x = waves({3, 6, 2, 2});
  const auto wanted = evaluate(x);
  on_worlds([&](const DeviceMesh& mesh) {
    for (const Placement& placement : placements) {
      const auto found = evaluate(distribute_tensor(x, mesh, {placement}));
      expect_close(whole(std::get<0>(found)), std::get<0>(wanted));
      expect_close(whole(std::get<1>(found)), std::get<1>(wanted));
      expect_close(whole(std::get<2>(found)), std::get<2>(wanted));
    }
  });
  const OnOneTensor evaluation{"evaluation",
                               [=](const auto& t) { return std::get<0>(evaluate(t)); }};
  expect_on_parts({evaluation}, x, placements);
}

TEST(OperatorsOnParts, BatchNormsInEvaluationHaveTheStatisticsThatTheKernelGives) {
  const NormOfImages norm;
  expect_the_kernels_statistics(norm);
  torch::Library kernels(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernels.impl("native_batch_norm", TORCH_FN(evaluate_and_keep_statistics));
  expect_the_kernels_statistics(norm);
}

// Whatever way the call goes: they are this rank's own, or lie as the channels do.
TEST(OperatorsOnParts, RunningStatisticsAreWritten) {
  on_worlds([](const DeviceMesh& mesh) {
    const auto train = [](const at::Tensor& x, const at::Tensor& mean, const at::Tensor& variance) {
      at::batch_norm(x, {}, {}, mean, variance, /*training=*/true, 0.3, 1e-5, false);
    };
    const at::Tensor wanted_mean = waves({6}), wanted_variance = waves({6}).abs();
    train(waves({5, 6, 2}), wanted_mean, wanted_variance);
    for (const Placement& placement : std::vector<Placement>{Replicate{}, Shard{0}, Shard{1}}) {
      const at::Tensor x = distribute_tensor(waves({5, 6, 2}), mesh, {placement});
      const at::Tensor mean = waves({6}), variance = waves({6}).abs();
      train(x, mean, variance);
      expect_close(mean, wanted_mean);
      expect_close(variance, wanted_variance);
    }
    const auto cut = [&](const at::Tensor& plain, int64_t dim) {
      return distribute_tensor(plain, mesh, {Shard{dim}});
    };
    const at::Tensor mean = cut(waves({6}), 0), variance = cut(waves({6}).abs(), 0);
    train(cut(waves({5, 6, 2}), 1), mean, variance);
    expect_close(whole(mean), wanted_mean);
    expect_close(whole(variance), wanted_variance);
  });
}

TEST(OperatorsOnParts, PoolingAndInterpolation) {
  const std::vector<OnOneTensor> planes{{"max_pool2d",
                                         [](const auto& x) {
                                           return at::max_pool2d(x, {2, 2});
                                         }},
                                        {"avg_pool2d",
                                         [](const auto& x) {
                                           return at::avg_pool2d(x, {2, 2});
                                         }},
                                        {"adaptive_avg_pool2d",
                                         [](const auto& x) {
                                           return at::adaptive_avg_pool2d(x, {3, 2});
                                         }},
                                        {"adaptive_max_pool2d",
                                         [](const auto& x) {
                                           return std::get<0>(at::adaptive_max_pool2d(x, {3, 2}));
                                         }},
                                        {"nearest",
                                         [](const auto& x) {
                                           return at::upsample_nearest2d(x, {7, 8});
                                         }},
                                        {"bilinear",
                                         [](const auto& x) {
                                           return at::upsample_bilinear2d(x, {7, 8}, false);
                                         }},
                                        {"bicubic", [](const auto& x) {
                                           return at::upsample_bicubic2d(x, {7, 8}, true);
                                         }}};
  expect_on_parts(planes, waves({3, 5, 4, 6}), {Replicate{}, Shard{0}, Shard{1}});
  expect_on_parts(planes, waves({1, 5, 4, 6}), {Shard{0}});
}

// Channels of which some rank would have none are gathered.
TEST(OperatorsOnParts, ImagesInAnyPlacement) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{2, 1, 4, 4}, {3, 2, 4, 4}}) {
    expect_as_plain([=] {
      return Problem{
          {waves(shape)}, [](const auto& t) {
            return at::max_pool2d(t[0], {2, 2})
                .add(at::adaptive_avg_pool2d(t[0], {2, 2}))
                .mul(at::upsample_bilinear2d(at::avg_pool2d(t[0], {3, 3}), {2, 2}, true));
          }};
    });
    expect_as_plain([=] {
      const auto norm = [](const at::Tensor& x) {
        return at::batch_norm(x, {}, {}, waves({x.size(1)}), waves({x.size(1)}).abs(),
                              /*training=*/false, 0.1, 1e-5, false);
      };
      return Problem{{waves(shape)}, [=](const auto& t) { return norm(t[0]); }};
    });
  }
}

}  // namespace
}  // namespace fsdp
