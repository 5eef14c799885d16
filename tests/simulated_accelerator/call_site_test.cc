#include "tests/simulated_accelerator/call_site.h"

#include "tests/simulated_accelerator/run.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

// As the library's own, which is no part of fsdp::testing.
namespace fsdp::stands_for_library {
namespace {

__attribute__((noinline)) double launches_and_waits(const at::Tensor& x) {
  return x.sum().item<double>() + 1;
}

}  // namespace

__attribute__((noinline)) double calls_it(const at::Tensor& x) { return launches_and_waits(x) * 2; }

}  // namespace fsdp::stands_for_library

namespace fsdp::testing::simulated {
namespace {

TEST(CallSites, AreTheFunctionsOfTheLibraryThatLaunchAndWait) {
  const auto report = run_in({.places = Settings::Places::kRecorded}, [] {
    stands_for_library::calls_it(at::ones({3}, at::TensorOptions(kDevice)));
  });
  const std::string place =
      "fsdp::stands_for_library::(anonymous namespace)::launches_and_waits < "
      "fsdp::stands_for_library::calls_it\n";
  EXPECT_EQ(places(report.devices[0].host_syncs), "1 x item | " + place);
  EXPECT_THAT(places(report.devices[0].launches),
              ::testing::HasSubstr("1 x aten::sum.dim_IntList | " + place));
  EXPECT_GT(report.devices[0].launches.by_name.at("aten::fill_.Scalar"), 0)
      << "launched by nobody in the library, so without a place";
}

}  // namespace
}  // namespace fsdp::testing::simulated
