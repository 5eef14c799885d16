// Random operators on DTensors, beside the same ones on plain tensors of one device whose
// generator was seeded alike: equal bit for bit, wherever the operands lie.
#include "dtensor/dtensor.h"
#include "dtensor/manual_seed.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/partial_values.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

at::Tensor next_numbers() { return at::rand({3}); }

bool has_partial(const at::Tensor& dtensor) {
  const auto& placements = DTensor(dtensor).placements();
  return std::any_of(placements.begin(), placements.end(),
                     [](const auto& placement) { return placement.is_partial(); });
}

// What becomes of terms: they are added first, or the operator works on each of them,
// which rounds otherwise. What a mask drops is dropped from each.
enum class OfTerms { kAddedFirst, kRoundedEach };

void expect_same_numbers(const at::Tensor& found, const at::Tensor& wanted, bool exactly) {
  EXPECT_TRUE(is_dtensor(found));
  const at::Tensor value = whole(found);
  if (exactly) {
    EXPECT_TRUE(value.equal(wanted));
  } else {
    EXPECT_EQ(value.scalar_type(), wanted.scalar_type());
    EXPECT_TRUE(at::allclose(value.to(at::kDouble), wanted.to(at::kDouble), 1e-5, 1e-5));
    EXPECT_TRUE(value.eq(0).equal(wanted.eq(0)));
  }
}

// The plain run and the one on DTensors begin in the same state, and must end in one.
void compare_drawn(const Case& test, const DeviceMesh& mesh, const at::Tensor& dtensor,
                   const at::Tensor& plain, OfTerms terms = OfTerms::kAddedFirst) {
  SCOPED_TRACE(test.name);
  manual_seed(9, mesh);
  const Tensors wanted = test.function(plain.clone());
  const at::Tensor next = next_numbers();
  manual_seed(9, mesh);
  const bool exactly = terms == OfTerms::kAddedFirst || !has_partial(dtensor);
  const Tensors found = test.function(dtensor);
  EXPECT_TRUE(next_numbers().equal(next));
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) expect_same_numbers(found[i], wanted[i], exactly);
}

void expect_drawn_alike(const std::vector<Case>& cases, OfTerms terms = OfTerms::kAddedFirst) {
  on_meshes([&](const DeviceMesh& mesh) {
    for (const auto& test : cases) {
      on_placements(mesh, [&](const at::Tensor& dtensor, const at::Tensor& plain) {
        compare_drawn(test, mesh, dtensor, plain, terms);
      });
    }
  });
}

// Twice `t`, after `change` in place.
template <class Change>
at::Tensor changed(const at::Tensor& t, const Change& change) {
  at::Tensor twice = t * 2;
  change(twice);
  return twice;
}

at::Tensor between_zero_and_one(const at::Tensor& t) { return t.abs().div(32).clamp(0, 1); }

TEST(RandomNumbers, FillsAreThoseOfOneDevice) {
  expect_drawn_alike(
      {
          {"normal_", [](const auto& t) { return Tensors{t.normal_()}; }},
          {"uniform_", [](const auto& t) { return Tensors{t.uniform_()}; }},
          {"bernoulli_", [](const auto& t) { return Tensors{t.bernoulli_(0.4)}; }},
          {"random_", [](const auto& t) { return Tensors{t.random_(0, 99)}; }},
          {"exponential_", [](const auto& t) { return Tensors{t.exponential_()}; }},
          {"cauchy_", [](const auto& t) { return Tensors{t.cauchy_()}; }},
          {"geometric_", [](const auto& t) { return Tensors{t.geometric_(0.4)}; }},
          {"log_normal_", [](const auto& t) { return Tensors{t.log_normal_()}; }},
          {"of columns",
           [](const auto& t) {
             return Tensors{t.t().normal_(), t};
           }},
          {"of a new tensor",
           [](const auto& t) { return Tensors{at::empty_like(t).bernoulli_(0.4)}; }},
          {"of doubles", [](const auto& t) { return Tensors{t.to(at::kDouble).normal_()}; }},
      },
      OfTerms::kRoundedEach);
}

TEST(RandomNumbers, NewTensorsAreThoseOfOneDevice) {
  expect_drawn_alike({
      {"rand_like", [](const auto& t) { return Tensors{at::rand_like(t)}; }},
      {"randn_like", [](const auto& t) { return Tensors{at::randn_like(t.t())}; }},
      {"randint_like",
       [](const auto& t) {
         return Tensors{at::randint_like(t, 9), at::randint_like(t, -3, 5)};
       }},
      {"bernoulli by number", [](const auto& t) { return Tensors{at::bernoulli(t, 0.4)}; }},
  });
}

TEST(RandomNumbers, ByValuesAreThoseOfOneDevice) {
  expect_drawn_alike({
      {"bernoulli", [](const auto& t) { return Tensors{at::bernoulli(between_zero_and_one(t))}; }},
      {"bernoulli_ by tensor",
       [](const auto& t) {
         return Tensors{at::empty_like(t).bernoulli_(between_zero_and_one(t)),
                        at::empty_like(t).bernoulli_(between_zero_and_one(t).amax(0))};
       }},
      {"bernoulli_ by a plain tensor",
       [](const auto& t) {
         return Tensors{t.bernoulli_(at::linspace(0.1, 0.9, 4, t.scalar_type()))};
       }},
      {"bernoulli of another's shape",
       [](const auto& t) { return Tensors{at::bernoulli(t, between_zero_and_one(t))}; }},
      {"normal",
       [](const auto& t) {
         return Tensors{at::normal(t, t.abs()), at::normal(t, 2.0), at::normal(1.0, t.abs()),
                        at::normal(t, t.abs().amax(0))};
       }},
      {"poisson", [](const auto& t) { return Tensors{at::poisson(t.abs())}; }},
      {"binomial",
       [](const auto& t) { return Tensors{at::binomial(t.abs(), between_zero_and_one(t))}; }},
      {"gamma", [](const auto& t) { return Tensors{at::_standard_gamma(t.abs().add(1))}; }},
      {"multinomial", [](const auto& t) { return Tensors{at::multinomial(t.abs().add(1), 3)}; }},
  });
}

TEST(RandomNumbers, DropoutsAreThoseOfOneDevice) {
  const auto image = [](const at::Tensor& t) { return t.unsqueeze(2).unsqueeze(3).mul(2); };
  expect_drawn_alike(
      {
          {"dropout",
           [](const auto& t) {
             return Tensors{at::dropout(t, 0.4, true), t};
           }},
          {"dropout in place",
           [](const auto& t) {
             return Tensors{changed(t, [](auto& x) { at::dropout_(x, 0.4, true); })};
           }},
          {"dropout module",
           [](const auto& t) {
             torch::nn::Dropout kept(0.4), in_place(torch::nn::DropoutOptions(0.4).inplace(true));
             return Tensors{kept(t), in_place(t.mul(2))};
           }},
          {"alpha dropout",
           [](const auto& t) {
             return Tensors{at::alpha_dropout(t, 0.4, true),
                            changed(t, [](auto& x) { at::alpha_dropout_(x, 0.4, true); })};
           }},
          {"dropout of features",
           [image](const auto& t) {
             torch::nn::Dropout2d drop(0.4);
             return Tensors{drop(image(t)),
                            changed(image(t), [](auto& x) { at::feature_dropout_(x, 0.4, true); })};
           }},
          {"alpha dropout of features",
           [image](const auto& t) {
             return Tensors{
                 at::feature_alpha_dropout(image(t), 0.4, true),
                 changed(image(t), [](auto& x) { at::feature_alpha_dropout_(x, 0.4, true); })};
           }},
      },
      OfTerms::kRoundedEach);
}

TEST(RandomNumbers, DropoutsInOneOperatorAreThoseOfOneDevice) {
  expect_drawn_alike({
      {"native_dropout",
       [](const auto& t) {
         auto [kept, mask] = at::native_dropout(t, 0.4, true);
         auto [all, nothing_dropped] = at::native_dropout(t, 0.4, false);
         return Tensors{kept, mask, all, nothing_dropped};
       }},
      {"native_dropout of everything",
       [](const auto& t) { return Tensors{std::get<0>(at::native_dropout(t, 1, true))}; }},
      {"native_dropout of 16 bits",
       [](const auto& t) {
         return Tensors{std::get<0>(at::native_dropout(t.to(at::kBFloat16).div(3), 0.4, true))};
       }},
      {"rrelu",
       [](const auto& t) {
         return Tensors{at::rrelu(t, 0.1, 0.3, true), at::rrelu(t, 0.1, 0.3, false),
                        changed(t, [](auto& x) { at::rrelu_(x, 0.1, 0.3, true); }),
                        changed(t.clamp(-9, 9), [](auto& x) { at::rrelu_(x, 0.1, 0.3, false); })};
       }},
  });
}

// Results and gradients of x, where it is cut, replicated or terms.
TEST(RandomNumbers, AreDifferentiable) {
  const std::vector<Case> cases = {
      {"dropout", [](const auto& x) { return Tensors{at::dropout(x, 0.4, true)}; }},
      {"native_dropout",
       [](const auto& x) { return Tensors{std::get<0>(at::native_dropout(x, 0.4, true))}; }},
      {"alpha dropout", [](const auto& x) { return Tensors{at::alpha_dropout(x, 0.4, true)}; }},
      {"rrelu",
       [](const auto& x) {
         return Tensors{at::rrelu(x, 0.1, 0.3, true), at::rrelu(x, 0.1, 0.3, false)};
       }},
      {"in place",
       [](const auto& x) {
         return Tensors{changed(x, [](auto& y) {
           at::dropout_(y, 0.4, true);
           at::rrelu_(y, 0.1, 0.3, true);
         })};
       }},
  };
  const auto with_gradient = [](const Case& test) {
    return Case{test.name, [test](const at::Tensor& t) {
                  const at::Tensor x = t.detach().requires_grad_();
                  Tensors results = test.function(x);
                  at::Tensor loss = at::zeros({});
                  for (const at::Tensor& each : results) loss = loss + each.square().sum();
                  loss.backward();
                  for (at::Tensor& each : results) each = each.detach();
                  results.push_back(x.grad());
                  return results;
                }};
  };
  std::vector<Case> with_gradients;
  for (const auto& test : cases) with_gradients.push_back(with_gradient(test));
  expect_drawn_alike(with_gradients, OfTerms::kRoundedEach);
}

TEST(RandomNumbers, InitialisersAreThoseOfOneDevice) {
  namespace init = torch::nn::init;
  expect_drawn_alike(
      {
          {"normal_", [](const auto& t) { return Tensors{init::normal_(t, 1, 2)}; }},
          {"uniform_", [](const auto& t) { return Tensors{init::uniform_(t, 1, 2)}; }},
          {"xavier",
           [](const auto& t) {
             return Tensors{init::xavier_normal_(t), init::xavier_uniform_(t)};
           }},
          {"kaiming",
           [](const auto& t) {
             return Tensors{init::kaiming_normal_(t), init::kaiming_uniform_(t)};
           }},
      },
      OfTerms::kRoundedEach);
}

// Heads, packed matrices and flattened batches: interleaved cuts keep the elements of the
// ranks' blocks.
TEST(RandomNumbers, InterleavedCutsAreThoseOfOneDevice) {
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    const at::Tensor plain = at::linspace(-1, 1, 24 * 4).view({24, 4});
    for (const Shard& cut : {Shard{0, 3, 4}, Shard{0, 2, 1}, Shard{0, 1, 6}, Shard{0, 6, 2}}) {
      SCOPED_TRACE(to_string(Placement(cut)));
      const at::Tensor dtensor = distribute_tensor(plain, mesh, {cut});
      compare_drawn({"dropout", [](const auto& t) { return Tensors{at::dropout(t, 0.4, true)}; }},
                    mesh, dtensor, plain);
      compare_drawn({"native_dropout",
                     [](const auto& t) {
                       auto [kept, mask] = at::native_dropout(t, 0.4, true);
                       return Tensors{kept, mask};
                     }},
                    mesh, dtensor, plain);
      compare_drawn({"rrelu", [](const auto& t) { return Tensors{at::rrelu(t, 0.1, 0.3, true)}; }},
                    mesh, dtensor, plain);
      compare_drawn({"bernoulli_", [](const auto& t) { return Tensors{t.bernoulli_(0.4)}; }}, mesh,
                    dtensor, plain);
    }
  });
}

TEST(RandomNumbers, AttentionWithDropoutAndHeadsCutIsThatOfOneDevice) {
  for (const int64_t world : {1, 2, 3}) {
    on_ranks_of(world, [](int64_t, const DeviceMesh& mesh) {
      const at::Tensor plain = at::linspace(-1, 1, 2 * 3 * 5 * 4).view({2, 3, 5, 4});
      const auto attend = [](const at::Tensor& q) {
        return Tensors{at::scaled_dot_product_attention(q, q, q, {}, 0.4)};
      };
      for (const int64_t dim : {0, 1}) {
        manual_seed(9, mesh);
        const at::Tensor wanted = attend(plain)[0];
        manual_seed(9, mesh);
        const at::Tensor found = attend(distribute_tensor(plain, mesh, {Shard{dim}}))[0];
        const Placement stays = mesh.size() > 1 ? Shard{dim} : Shard{0};
        EXPECT_EQ(DTensor(found).placements()[0], stays);
        EXPECT_TRUE(at::allclose(whole(found), wanted, 1e-5, 1e-6));
        EXPECT_TRUE(whole(found).eq(0).equal(wanted.eq(0)));
      }
    });
  }
}

TEST(RandomNumbers, DrawMoreWithoutAnySeed) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    manual_seed(9, mesh);
    const auto t = distribute_tensor(at::ones({40}), mesh, {Shard{0}});
    const at::Tensor first = whole(at::dropout(t, 0.5, true));
    EXPECT_FALSE(whole(at::dropout(t, 0.5, true)).equal(first));
  });
}

TEST(RandomNumbers, AMaskMovesNothing) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    manual_seed(9, mesh);
    const auto t = distribute_tensor(at::ones({40}), mesh, {Shard{0}});
    int moves = 0;
    const internal::CommListener heard([&moves](const internal::CommEvent&) { ++moves; });
    at::dropout(t, 0.5, true);
    at::native_dropout(t, 0.5, true);
    EXPECT_EQ(moves, 0);
    at::rrelu(t, 0.1, 0.3, true);
    EXPECT_EQ(moves, 1);
  });
}

TEST(RandomNumbers, OfRanksThatAreNotInStepAreRefused) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto on = [](const DeviceMesh& where, const Placement& inner) {
      std::vector<Placement> placements(static_cast<size_t>(where.ndim()), Replicate{});
      placements.back() = inner;
      return distribute_tensor(at::ones({4, 2}), where, placements);
    };
    manual_seed(9, mesh["tp"]);
    on(mesh["tp"], Shard{0}).normal_();
    for (const std::function<void()>& draw : std::vector<std::function<void()>>{
             [&] { on(mesh, Shard{0}).normal_(); }, [&] { at::rand_like(on(mesh, Shard{0})); },
             [&] { at::bernoulli(on(mesh["dp"], Shard{0})); },
             [&] { at::multinomial(on(mesh, Replicate{}), 1); },
             [&] { at::native_dropout(on(mesh, Shard{1}), 0.5, true); }}) {
      expect_error<c10::ValueError>(draw, HasSubstr("manual_seed has ranks"));
    }
    on(mesh, Shard{0}).normal_(0, 1, at::detail::createCPUGenerator(3));
    manual_seed(9, mesh);
    on(mesh, Shard{0}).normal_();
    on(mesh["dp"], Shard{0}).normal_();
  });
}

}  // namespace
}  // namespace fsdp::testing
