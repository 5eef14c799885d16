// A replicated weight that each rank uses on data of its own: what its gradient is.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::waves;
using testing::whole;
using Placements = std::vector<Placement>;

// The gradient of the sum of all ranks' losses, each of data of its own.
TEST(GradPlacements, OfAReplicatedWeightOnOwnDataAddUp) {
  for (int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const auto data = [](int64_t of) { return waves({4}).mul(static_cast<double>(of + 1)); };
      at::Tensor all = at::zeros({4}, at::kDouble);
      for (int64_t r = 0; r < world; ++r) all.add_(data(r));
      const auto gradient_of = [&](const ToLocalOptions& options) {
        const at::Tensor weight =
            distribute_tensor(waves({4}, 0.2), mesh, {Replicate{}}).set_requires_grad(true);
        DTensor(weight).to_local(options).mul(data(rank)).sum().backward();
        return DTensor(weight.grad());
      };
      const DTensor sum = gradient_of({.grad_placements = Placements{Partial{}}});
      EXPECT_EQ(sum.placements(), Placements{Partial{}});
      EXPECT_TRUE(whole(sum).allclose(all));
      const Partial average{Partial::Op::kAvg};
      EXPECT_TRUE(whole(gradient_of({.grad_placements = Placements{average}}))
                      .allclose(all.div(static_cast<double>(world))));
      EXPECT_TRUE(gradient_of({}).to_local().equal(data(rank)));  // as Python: each its own
    });
  }
}

TEST(GradPlacements, OfAWholeValueOnOwnDataAddUp) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor weight =
        distribute_tensor(waves({5, 3}), mesh, {Shard{0}}).set_requires_grad(true);
    DTensor(weight)
        .full_tensor({.grad_placements = Placements{Partial{}}})
        .mul(static_cast<double>(rank + 1))
        .sum()
        .backward();
    EXPECT_TRUE(whole(weight.grad()).equal(at::full({5, 3}, 3.0, at::kDouble)));
  });
}

TEST(GradPlacements, ThatDoNotFitAreRefused) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const DTensor t = distribute_tensor(waves({4, 2}), mesh, {Shard{0}});
    const auto refused = [&](const Placements& placements) {
      return error_of([&] { t.to_local({.grad_placements = placements}); });
    };
    EXPECT_THAT(refused({Replicate{}}), HasSubstr("to_local: grad_placements: of shape [4, 2]"));
    EXPECT_THAT(refused({Shard{5}}), HasSubstr("out of range"));
    EXPECT_THAT(refused({}), HasSubstr("expected one per mesh dimension"));
    EXPECT_EQ(refused({Shard{-2}}), "no error");
    const DTensor number = distribute_tensor(at::ones({}), mesh, {Replicate{}});
    EXPECT_THAT(error_of([&] {
                  number.to_local({.grad_placements = Placements{Partial{Partial::Op::kMax}}});
                }),
                HasSubstr("Partial(max)"));
    EXPECT_THAT(error_of([&] { number.redistribute({Shard{0}}); }),
                HasSubstr("allowed: Replicate() and Partial()"));
  });
}

}  // namespace
}  // namespace fsdp
