// manual_seed: what a thread then draws, and what it leaves alone.
#include "dtensor/manual_seed.h"

#include "dtensor/random/thread_generators.h"
#include "tests/support/errors.h"
#include "tests/support/on_another_thread.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <functional>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

struct Drawer {
  const char* name;
  std::function<at::Tensor()> draw;
};

at::Tensor probabilities() { return at::linspace(0.1, 0.9, 24).view({2, 3, 2, 2}); }

// What takes a generator, what calls such operators, and modules' own operators.
const Drawer kDrawers[] = {
    {"rand", [] { return at::rand({20}); }},
    {"randn", [] { return at::randn({20}); }},
    {"randint", [] { return at::randint(9, {20}); }},
    {"randperm", [] { return at::randperm(20); }},
    {"rand_like", [] { return at::rand_like(probabilities()); }},
    {"randn_like", [] { return at::randn_like(probabilities()); }},
    {"randint_like", [] { return at::randint_like(probabilities(), 9); }},
    {"normal_", [] { return at::empty({20}).normal_(); }},
    {"uniform_", [] { return at::empty({20}).uniform_(); }},
    {"random_", [] { return at::empty({20}).random_(); }},
    {"exponential_", [] { return at::empty({20}).exponential_(); }},
    {"geometric_", [] { return at::empty({20}).geometric_(0.5); }},
    {"cauchy_", [] { return at::empty({20}).cauchy_(); }},
    {"log_normal_", [] { return at::empty({20}).log_normal_(); }},
    {"bernoulli_", [] { return at::empty({20}).bernoulli_(0.5); }},
    {"bernoulli_ by tensor", [] { return at::empty({24}).bernoulli_(probabilities().view(-1)); }},
    {"bernoulli", [] { return at::bernoulli(probabilities()); }},
    {"bernoulli by number", [] { return at::bernoulli(probabilities(), 0.5); }},
    {"multinomial",
     [] {
       return at::multinomial(at::ones({4, 6}), 3);
     }},
    {"normal", [] { return at::normal(probabilities(), probabilities()); }},
    {"poisson", [] { return at::poisson(probabilities()); }},
    {"binomial", [] { return at::binomial(at::full({24}, 9.), probabilities().view(-1)); }},
    {"gamma", [] { return at::_standard_gamma(probabilities()); }},
    {"dirichlet", [] { return at::_sample_dirichlet(probabilities()); }},
    {"dropout", [] { return at::dropout(probabilities(), 0.5, true); }},
    {"native_dropout", [] { return std::get<1>(at::native_dropout(probabilities(), 0.5, true)); }},
    {"feature_dropout", [] { return at::feature_dropout(probabilities(), 0.5, true); }},
    {"alpha_dropout", [] { return at::alpha_dropout(probabilities(), 0.5, true); }},
    {"feature_alpha_dropout", [] { return at::feature_alpha_dropout(probabilities(), 0.5, true); }},
    {"rrelu", [] { return at::rrelu(probabilities() - 0.5, 0.1, 0.3, true); }},
    {"attention",
     [] {
       const at::Tensor q = probabilities();
       return at::scaled_dot_product_attention(q, q, q, {}, 0.5);
     }},
};

TEST(ManualSeed, GivesEveryOperatorTheNumbersOfASeededDevice) {
  on_one_rank([](const DeviceMesh& mesh) {
    for (const auto& [name, draw] : kDrawers) {
      SCOPED_TRACE(name);
      at::manual_seed(7);
      const std::array wanted = {draw(), draw()};
      const auto state = internal::generator_state(at::detail::getDefaultCPUGenerator());
      manual_seed(7, mesh);
      for (const at::Tensor& numbers : wanted) EXPECT_TRUE(draw().equal(numbers));
      use_default_generator();
      EXPECT_TRUE(internal::generator_state(at::detail::getDefaultCPUGenerator()).equal(state))
          << "the default generator was left alone";
    }
  });
}

TEST(ManualSeed, HoldsForTheThreadUntilItIsEnded) {
  on_one_rank([](const DeviceMesh& mesh) {
    at::manual_seed(1);
    const at::Tensor by_default = at::rand({20});
    at::manual_seed(1);
    manual_seed(2, mesh);
    const at::Tensor own = at::rand({20});
    EXPECT_FALSE(own.equal(by_default));
    at::Tensor beside;
    on_another_thread([&] { beside = at::rand({20}); });
    EXPECT_TRUE(beside.equal(by_default));
    manual_seed(2, mesh);
    EXPECT_TRUE(at::rand({20}).equal(own));
    at::manual_seed(1);
    EXPECT_FALSE(at::rand({20}).equal(by_default));
    use_default_generator();
    EXPECT_TRUE(at::rand({20}).equal(by_default));
  });
}

TEST(ManualSeed, LeavesAGeneratorThatIsGivenItsDraws) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto given = at::detail::createCPUGenerator(3);
    const at::Tensor wanted = at::rand({20}, given);
    manual_seed(2, mesh);
    given.set_current_seed(3);
    EXPECT_TRUE(at::rand({20}, given).equal(wanted));
  });
}

TEST(ManualSeed, IsOfEveryDtypeAndOfNoMetaTensor) {
  on_one_rank([](const DeviceMesh& mesh) {
    manual_seed(2, mesh);
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble, at::kInt})
      EXPECT_EQ(at::empty({20}, dtype).random_(0, 4).scalar_type(), dtype);
    const auto state = internal::generator_state(internal::generator_of_thread(c10::kCPU));
    EXPECT_EQ(at::rand({20}, at::device(at::kMeta)).numel(), 20);
    EXPECT_TRUE(internal::generator_state(internal::generator_of_thread(c10::kCPU)).equal(state));
  });
}

TEST(ManualSeed, IsInStepOnAMeshAndDiffersBetweenItsSlices) {
  std::array<at::Tensor, 4> drawn, again, of_the_whole;
  run_ranks(4, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto at_rank = static_cast<size_t>(rank);
    manual_seed(11, mesh["tp"]);
    drawn[at_rank] = at::rand({20});
    manual_seed(11, mesh["tp"]);
    again[at_rank] = at::rand({20});
    manual_seed(11, mesh);
    of_the_whole[at_rank] = at::rand({20});
  });
  at::manual_seed(11);
  const at::Tensor one_device = at::rand({20});
  EXPECT_TRUE(drawn[0].equal(one_device));
  EXPECT_TRUE(drawn[1].equal(one_device));
  EXPECT_FALSE(drawn[2].equal(one_device));
  EXPECT_TRUE(drawn[3].equal(drawn[2]));
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(again[rank].equal(drawn[rank]));
    EXPECT_TRUE(of_the_whole[rank].equal(one_device));
  }
  at::manual_seed(12);
  EXPECT_FALSE(at::rand({20}).equal(drawn[2])) << "another seed's";
}

TEST(ManualSeed, OfOneThreadIsNotDisturbedByOthers) {
  std::array<at::Tensor, 3> drawn;
  at::manual_seed(4);
  std::array<at::Tensor, 3> wanted;
  for (int64_t rank = 0; rank < 3; ++rank) {
    at::manual_seed(static_cast<uint64_t>(20 + rank));
    for (int i = 0; i < 200; ++i) wanted[static_cast<size_t>(rank)] = at::rand({50});
  }
  const auto state = internal::generator_state(at::detail::getDefaultCPUGenerator());
  run_ranks(3, [&](int64_t rank) {
    manual_seed(static_cast<uint64_t>(20 + rank), init_device_mesh(c10::kCPU, {3}));
    for (int i = 0; i < 200; ++i) drawn[static_cast<size_t>(rank)] = at::rand({50});
  });
  for (size_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(drawn[rank].equal(wanted[rank])) << rank;
  EXPECT_TRUE(internal::generator_state(at::detail::getDefaultCPUGenerator()).equal(state));
}

TEST(ManualSeed, WhereItWouldEndByItselfIsRefused) {
  on_one_rank([](const DeviceMesh& mesh) {
    const c10::InferenceMode inference;
    expect_error<c10::ValueError>([&] { manual_seed(1, mesh); }, HasSubstr("InferenceMode"));
    expect_error<c10::ValueError>([] { use_default_generator(); }, HasSubstr("InferenceMode"));
  });
  on_one_rank([](const DeviceMesh& mesh) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    x.register_hook([&](const at::Tensor&) {
      expect_error<c10::ValueError>([&] { manual_seed(1, mesh); }, HasSubstr("backward"));
    });
    x.sum().backward();
  });
}

TEST(ManualSeed, HoldsInAnInferenceModeThatBeginsLater) {
  on_one_rank([](const DeviceMesh& mesh) {
    at::manual_seed(5);
    const at::Tensor wanted = at::rand({40});
    manual_seed(5, mesh);
    at::Tensor first;
    {
      const c10::InferenceMode inference;
      first = at::rand({20});
    }
    EXPECT_TRUE(at::cat({first.clone(), at::rand({20})}).equal(wanted));
  });
}

// What kernels of devices get that take no generator.
TEST(DefaultGeneratorAs, DrawsAsTheOtherAndIsThenAsBefore) {
  at::manual_seed(1);
  const at::Tensor of_default = at::rand({20});
  at::manual_seed(2);
  const at::Tensor of_other = at::rand({40});
  at::manual_seed(1);
  auto other = at::detail::createCPUGenerator(2);
  {
    const internal::DefaultGeneratorAs lent(other);
    EXPECT_TRUE(at::rand({20}).equal(of_other.narrow(0, 0, 20)));
  }
  EXPECT_TRUE(at::rand({20}, other).equal(of_other.narrow(0, 20, 20)));
  EXPECT_TRUE(at::rand({20}).equal(of_default));
}

}  // namespace
}  // namespace fsdp::testing
