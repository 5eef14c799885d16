// Views that can not keep a cut: gathered copies with the right numbers and gradients,
// and one noted redistribution each. Written: written_views_test.cc.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using testing::expect_as_plain;
using testing::expect_same;
using ::testing::IsEmpty;
using testing::Problem;
using testing::run_ranks;
using testing::waves;
using testing::whole;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

DeviceMesh two_ranks() { return init_device_mesh(c10::kCPU, {2}); }

TEST(GatheredViews, HaveTheValuesOfViewsOfTheWhole) {
  expect_same({
      {"view",
       [](const auto& t) {
         return Tensors{t.view(-1), t.view({4, -1}), t.t().flatten()};
       }},
      {"squeeze",
       [](const auto& t) {
         const auto row = t.narrow(0, 0, 1);
         return Tensors{t.squeeze(),
                        t.squeeze(0),
                        row.squeeze(),
                        row.squeeze(0),
                        t.unsqueeze(1).squeeze(),
                        t.unsqueeze(0).squeeze(0)};
       }},
      {"expand",
       [](const auto& t) {
         return Tensors{t.narrow(0, 1, 1).expand({3, -1}), t.sum(0, true).expand({2, 4})};
       }},
      {"diagonal",
       [](const auto& t) {
         return Tensors{t.diagonal(), t.diagonal(1)};
       }},
  });
}

TEST(GatheredViews, HaveTheGradientsOfViewsOfTheWhole) {
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({20}, 0.3)}, [](const Tensors& t) {
                     return t[0].view(-1).mul(t[1]).view({2, 10});
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({2, 4}, 0.3)}, [](const Tensors& t) {
                     return t[0].narrow(0, 1, 2).mul(t[1]).add(t[0].select(1, 2).narrow(0, 0, 1));
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({6, 4})}, [](const Tensors& t) {
                     const auto parts = t[0].split(2, 0);
                     return at::cat({parts[0].mul(parts[1]), parts[2]}, 1).add(t[0][0].repeat(2));
                   }};
  });
}

TEST(GatheredViews, OfIndexedDimensionsHaveGradients) {
  expect_as_plain([] {
    return Problem{{waves({5, 4}), at::tensor({3, 0, 3}, at::kLong)}, [](const Tensors& t) {
                     return t[0].index_select(0, t[1]).mul(t[0].index({t[1]}));
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({5, 4}), at::tensor({3, 0, 4, 1}, at::kLong).view({2, 2})},
                   [](const Tensors& t) { return t[0].gather(0, t[1]); }};
  });
}

// What `body` notes on a tensor [4, 6], cut so.
std::vector<std::string> noted(const Placement& placement,
                               const std::function<void(const at::Tensor&)>& body) {
  const at::Tensor t = distribute_tensor(waves({4, 6}), two_ranks(), {placement});
  std::vector<std::string> notes;
  const internal::CommListener listener([&](const internal::CommEvent& event) {
    EXPECT_EQ(event.cause, internal::CommCause::kWhole);
    EXPECT_EQ(event.from, placement);
    EXPECT_EQ(event.to, Placement(Replicate{}));
    notes.push_back(event.operator_name);
  });
  body(t);
  return notes;
}

TEST(GatheredViews, AreNotedAndThoseThatKeepTheCutAreNone) {
  run_ranks(2, [](int64_t) {
    EXPECT_THAT(noted(Shard{1}, [](const auto& t) { t.view({3, 8}); }), ElementsAre("aten::view"));
    EXPECT_THAT(noted(Shard{1}, [](const auto& t) { t.view(-1).view({2, 12}); }), IsEmpty());
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { t.view(-1).view({4, 6}); }), IsEmpty());
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { t.select(0, 1); }),
                ElementsAre("aten::select"));
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { t.select(1, 1); }), IsEmpty());
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { t.split(1, 0); }), ElementsAre("aten::split"));
    EXPECT_THAT(noted(Shard{0},
                      [](const auto& t) {
                        at::cat({t, distribute_tensor(waves({3, 6}), two_ranks(), {Shard{0}})});
                      }),
                ElementsAre("aten::cat", "aten::cat"));
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { at::cat({t, t}); }), IsEmpty());
    EXPECT_THAT(noted(Shard{0}, [](const auto& t) { at::cat({t, t}, 1); }), IsEmpty());
    const auto first = at::zeros({1}, at::kLong);
    EXPECT_THAT(noted(Shard{0}, [&](const auto& t) { t.index_select(0, first); }),
                ElementsAre("aten::index_select"));
    EXPECT_THAT(noted(Shard{0}, [&](const auto& t) { t.index({first}); }),
                ElementsAre("aten::index"));
    EXPECT_THAT(noted(Shard{0},
                      [](const auto& t) {
                        t.gather(0, at::zeros({1, 6}, at::kLong));
                      }),
                ElementsAre("aten::gather"));
  });
}

TEST(GatheredViews, AreWrittenWithWhatTheyShowAndCopiesAreNot) {
  run_ranks(2, [](int64_t) {
    const at::Tensor t = distribute_tensor(waves({4, 6}), two_ranks(), {Shard{1}});
    const auto gathered = t.view({3, 8});
    EXPECT_TRUE(whole(gathered.clone().add_(1)).equal(waves({3, 8}).add(1)));
    EXPECT_TRUE(whole(gathered.mul(2).add_(1)).equal(waves({3, 8}).mul(2).add(1)));
    EXPECT_TRUE(whole(t).equal(waves({4, 6})));
    const at::Tensor plain = waves({4, 6});
    for (const auto& [view, of_plain] :
         {std::pair{gathered, plain.view({3, 8})},
          {gathered.narrow(0, 0, 2), plain.view({3, 8}).narrow(0, 0, 2)},
          {gathered.detach(), plain.view({3, 8})},
          {gathered.view({6, 4}), plain.view({6, 4})}}) {
      view.add_(1);
      of_plain.add_(1);
      EXPECT_TRUE(whole(t).equal(plain));
      at::add_out(const_cast<at::Tensor&>(view), view, 1);
      at::add_out(const_cast<at::Tensor&>(of_plain), of_plain, 1);
      EXPECT_TRUE(whole(t).equal(plain));
      EXPECT_TRUE(whole(view).equal(of_plain));
    }
  });
}

}  // namespace
}  // namespace fsdp
