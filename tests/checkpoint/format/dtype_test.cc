#include "checkpoint/format/dtype.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using internal::checkpoint::widens_exactly;

// A conversion that is said to lose nothing loses nothing: all values of the small
// dtypes.
TEST(Dtypes, WhatWidensExactlyComesBackAsItWas) {
  const auto dtypes = {torch::kDouble,          torch::kFloat,           torch::kHalf,
                       torch::kBFloat16,        torch::kFloat8_e4m3fn,   torch::kFloat8_e5m2,
                       torch::kFloat8_e4m3fnuz, torch::kFloat8_e5m2fnuz, torch::kFloat8_e8m0fnu};
  const auto all = torch::arange(256).to(torch::kByte);
  int exact = 0;
  for (const auto from : dtypes) {
    if (c10::elementSize(from) != 1) continue;
    const auto values = all.view(from);
    for (const auto to : dtypes) {
      if (!widens_exactly(from, to) || from == to) continue;
      ++exact;
      const auto wide = values.to(to).to(torch::kDouble), want = values.to(torch::kDouble);
      EXPECT_TRUE(torch::equal(wide.nan_to_num(77), want.nan_to_num(77))) << from << " " << to;
    }
  }
  EXPECT_EQ(exact, 5 * 4 - 1);
  EXPECT_FALSE(widens_exactly(torch::kFloat8_e8m0fnu, torch::kHalf));
  EXPECT_FALSE(widens_exactly(torch::kFloat4_e2m1fn_x2, torch::kFloat));
  EXPECT_TRUE(widens_exactly(torch::kComplexFloat, torch::kComplexDouble));
}

}  // namespace
}  // namespace fsdp::testing
