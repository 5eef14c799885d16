// Operators on the device: the CPU's values and dtypes, from kernels that run later.
#include "tests/simulated_accelerator/run.h"
#include "tests/support/errors.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <vector>

namespace fsdp::testing::simulated {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

// Of the same shape, dtype and bits as `expected`.
void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(actual.cpu().equal(expected));
}

// What `operation` gives on the device and on CPU.
void expect_as_on_cpu(const at::Tensor& input,
                      const std::function<at::Tensor(const at::Tensor&)>& operation) {
  for (const auto& schedule : schedules(1)) {
    run_in({.schedule = schedule},
           [&] { expect_same(operation(input.to(kDevice)), operation(input)); });
  }
}

TEST(Kernels, HaveNotRunBeforeSomebodyWaits) {
  run_in({.schedule = kLate}, [] {
    const auto x = at::zeros({4}, at::TensorOptions(kDevice));
    EXPECT_TRUE(x.cpu().equal(at::zeros({4})));
    x.add_(2);
    EXPECT_EQ(*static_cast<const float*>(x.const_data_ptr()), 0);
    EXPECT_TRUE(x.cpu().equal(at::full({4}, 2.0)));
    EXPECT_EQ(counters_now(kDevice).host_syncs.by_name["copy to CPU"], 2);
  });
}

TEST(Kernels, PromoteTypesByNumbersAsOnCpu) {
  const auto number = [] { return at::native::wrapped_scalar_tensor(0.3); };
  // With the flag lost these would be doubles: where that happens, it is found.
  const auto lost = [] { return at::scalar_tensor(0.3, at::kDouble); };
  for (const auto& input : {at::arange(5), at::full({}, 0.7f)}) {
    expect_as_on_cpu(input, [&](const at::Tensor& x) { return at::mul(x, number()); });
    const auto with_flag = at::mul(input, number()), without = at::mul(input, lost());
    EXPECT_NE(with_flag.scalar_type(), without.scalar_type());
  }
  expect_as_on_cpu(at::full({}, 0.7f),
                   [](const at::Tensor& x) { return at::add(x, 0.1, 3).div(7).pow(1.5); });
}

TEST(Kernels, TakeShapesFromOnesWhereZerosThrow) {
  const auto report = run_in({}, [] {
    const auto x = at::arange(4) * 3, divisor = at::arange(1, 5);
    const auto on_device = x.to(kDevice), divisor_on_device = divisor.to(kDevice);
    expect_same(at::floor_divide(on_device, divisor_on_device), at::floor_divide(x, divisor));
    expect_same(at::remainder(on_device, divisor_on_device), at::remainder(x, divisor));
  });
  EXPECT_THAT(report.devices[0].run_on_true_values.by_name, IsEmpty());
}

TEST(Kernels, WhoseShapesNeedValuesRunOnThem) {
  const auto repeats = at::tensor({2, 0, 3});
  const auto report = run_in({.schedule = kLate}, [&] {
    expect_same(at::repeat_interleave(repeats.to(kDevice)), at::repeat_interleave(repeats));
  });
  EXPECT_THAT(report.failures, IsEmpty());
}

TEST(Kernels, ThatReadValuesAreHostSyncs) {
  const auto values = at::tensor({0, 3, 0, 5});
  const auto syncs_of = [&](const std::function<void(const at::Tensor&)>& read) {
    const auto report = run_in({.schedule = kLate}, [&] {
      const auto x = values.to(kDevice, /*non_blocking=*/true);
      read(x);
    });
    return report.devices[0].host_syncs.by_name;
  };
  EXPECT_THAT(syncs_of([](const at::Tensor& x) { x.sum(); }), IsEmpty());
  EXPECT_THAT(
      syncs_of([](const at::Tensor& x) { at::index(x, {at::arange(2).to(kDevice, true)}); }),
      IsEmpty());
  EXPECT_THAT(syncs_of([](const at::Tensor& x) { EXPECT_EQ(x[1].item<int64_t>(), 3); }),
              ElementsAre(Pair("item", 1)));
  EXPECT_THAT(syncs_of([](const at::Tensor& x) { EXPECT_EQ(x.nonzero().size(0), 2); }),
              ElementsAre(Pair("aten::nonzero", 1)));
  EXPECT_THAT(syncs_of([](const at::Tensor& x) { EXPECT_EQ(x.index({x.gt(0)}).size(0), 2); }),
              ElementsAre(Pair("aten::index.Tensor", 1)));
  EXPECT_THAT(syncs_of([](const at::Tensor& x) { x.cpu(); }), ElementsAre(Pair("copy to CPU", 1)));
}

TEST(Kernels, ResizeOutputs) {
  run_in({.schedule = kLate}, [] {
    auto out = at::empty({0}, at::TensorOptions(kDevice));
    const auto a = at::arange(6, at::kFloat).view({2, 3});
    at::mm_out(out, a.to(kDevice), a.t().to(kDevice));
    expect_same(out, a.mm(a.t()));
    auto grown = at::arange(3).to(kDevice);
    grown.resize_({1000});
    expect_same(grown.narrow(0, 0, 3), at::arange(3));
  });
}

TEST(Kernels, AliasMemory) {
  run_in({.schedule = kLate}, [] {
    const auto x = at::zeros({4, 6}, at::TensorOptions(kDevice));
    x.t().narrow(0, 1, 2).select(1, 3).fill_(2);
    x.view({2, 12}).unfold(1, 3, 3).select(1, 0).add_(1);
    auto expected = at::zeros({4, 6});
    expected.t().narrow(0, 1, 2).select(1, 3).fill_(2);
    expected.view({2, 12}).unfold(1, 3, 3).select(1, 0).add_(1);
    expect_same(x, expected);
    auto other = at::empty({0}, x.options());
    other.set_(x);
    EXPECT_TRUE(other.is_alias_of(x));
    auto viewed = at::zeros({2}, x.options().dtype(at::kComplexFloat));
    EXPECT_THAT(message_of([&] { at::view_as_real(viewed); }), HasSubstr("makes a view"));
  });
}

TEST(Kernels, DrawWhatCpuDraws) {
  const auto draw = [](c10::Device device) {
    torch::manual_seed(5);
    std::vector<at::Tensor> drawn;
    const at::TensorOptions options(device);
    drawn.push_back(at::rand({7}, options));
    drawn.push_back(at::randn({20}, options));
    drawn.push_back(at::randperm(9, options.dtype(at::kLong)));
    drawn.push_back(at::dropout(at::ones({50}, options), 0.3, /*train=*/true));
    drawn.push_back(at::empty({8}, options).uniform_(-1, 1));
    drawn.push_back(at::bernoulli(at::full({8}, 0.5, options)));
    return drawn;
  };
  const auto expected = draw(c10::kCPU);
  for (const auto& schedule : schedules(1)) {
    run_in({.schedule = schedule}, [&] {
      const auto drawn = draw(kDevice);
      for (size_t i = 0; i < drawn.size(); ++i) expect_same(drawn[i], expected[i]);
    });
  }
}

TEST(Kernels, LeaveTheGeneratorOfCpuAlone) {
  run_in({}, [] {
    torch::manual_seed(5);
    const auto before = at::globalContext().defaultGenerator(c10::kCPU).get_state();
    at::dropout(at::rand({50}, at::TensorOptions(kDevice)), 0.3, /*train=*/true);
    EXPECT_TRUE(before.equal(at::globalContext().defaultGenerator(c10::kCPU).get_state()));
  });
}

TEST(Kernels, OverListsAreOneLaunch) {
  const auto report = run_in({.schedule = kLate}, [] {
    const at::TensorOptions options(kDevice);
    const std::vector<at::Tensor> a = {at::ones({3}, options), at::ones({5}, options)};
    const auto before = counters_now(kDevice).launches.total;
    at::_foreach_add_(a, 2);
    const auto norms = at::_foreach_norm(a);
    EXPECT_EQ(counters_now(kDevice).launches.total - before, 2);
    EXPECT_EQ(norms[1].cpu().item<float>(), at::full({5}, 3.0).norm().item<float>());
    const auto rows = at::arange(8, at::kFloat).view({2, 4}).to(kDevice);
    std::vector<at::Tensor> parts = {at::empty({2, 1}, options), at::empty({2, 3}, options)};
    at::split_with_sizes_copy_out(parts, rows, {1, 3}, 1);
    expect_same(parts[1], rows.cpu().narrow(1, 1, 3));
  });
  EXPECT_EQ(report.devices[0].launches.by_name.at("aten::split_with_sizes_copy.out"), 1);
}

TEST(Kernels, OfInferenceModeRunOutsideOfIt) {
  const auto report = run_in({.schedule = kLate}, [] {
    const auto x = at::ones({4}).to(kDevice);
    at::Tensor doubled;
    {
      const c10::InferenceMode inference;
      doubled = x * 2;
    }
    EXPECT_TRUE(doubled.cpu().equal(at::full({4}, 2.0)));
  });
  EXPECT_THAT(report.failures, IsEmpty());
}

TEST(Kernels, ThatFailTellWhoWaitsNext) {
  const auto report = run_in({.schedule = kLate}, [] {
    const auto table = at::ones({3, 2}).to(kDevice), row = at::full({1}, 7).to(kDevice);
    const auto looked_up = at::embedding(table, row);
    EXPECT_THAT(message_of([&] { looked_up.cpu(); }), HasSubstr("index out of range"));
    at::embedding(table, row);  // nobody waits for this one
  });
  EXPECT_THAT(report.failures, ElementsAre(HasSubstr("index out of range")));
}

TEST(Copies, FromPinnedMemoryReadItWhenTheyRun) {
  run_in({.schedule = kLate}, [] {
    auto pinned = at::ones({4}).pin_memory(), pageable = at::ones({4});
    EXPECT_TRUE(pinned.is_pinned());
    const auto of_pinned = pinned.to(kDevice, /*non_blocking=*/true);
    const auto of_pageable = pageable.to(kDevice, /*non_blocking=*/true);
    pinned.fill_(2);
    pageable.fill_(2);
    EXPECT_EQ(counters_now(kDevice).host_syncs.total, 0);
    EXPECT_TRUE(of_pinned.cpu().equal(at::full({4}, 2.0)));
    EXPECT_TRUE(of_pageable.cpu().equal(at::ones({4})));
  });
}

}  // namespace
}  // namespace fsdp::testing::simulated
