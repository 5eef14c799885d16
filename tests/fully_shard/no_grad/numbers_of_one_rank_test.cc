// C++ numbers of a rank's own beside what is computed from registry entries where no
// gradients are recorded: every rank would compute its part with another one.
#include "dtensor/redistribute/comm_listener.h"
#include "tests/fully_shard/no_grad/sharded_layer.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// An expression of `w` with the number `s`, and the operator that takes it.
struct OfNumber {
  std::string taken_by;
  std::function<torch::Tensor(const torch::Tensor& w, double s)> value;
};

const std::vector<OfNumber>& expressions_of_numbers() {
  using T = torch::Tensor;
  static const std::vector<OfNumber> expressions{
      {"aten::mul", [](const T& w, double s) { return w * s; }},
      {"aten::div", [](const T& w, double s) { return w / s; }},
      {"aten::add", [](const T& w, double s) { return w + s; }},
      {"aten::fill_", [](const T& w, double s) { return s - w; }},
      {"aten::fill_", [](const T& w, double s) { return s / (w.abs() + 1); }},
      {"aten::pow", [](const T& w, double s) { return w.abs().pow(s); }},
      {"aten::clamp", [](const T& w, double s) { return w.clamp(-s, s); }},
      {"aten::lerp", [](const T& w, double s) { return torch::lerp(w, w * 2, s); }},
      {"aten::add", [](const T& w, double s) { return torch::add(w, w.sin(), s); }},
      {"aten::leaky_relu", [](const T& w, double s) { return torch::leaky_relu(w, s); }},
      {"aten::mul", [](const T& w, double s) { return s * w.pow(2).sum(); }},
      {"aten::mul", [](const T& w, double s) { return (w * s).norm(); }},
      {"aten::mul", [](const T& w, double s) { return (w * s).t().softmax(0); }},
      {"aten::mul", [](const T& w, double s) { return (w * s).mm(w.t()); }},
      {"aten::mul_", [](const T& w, double s) { return w.clone().mul_(s); }},
      {"aten::add_", [](const T& w, double s) { return w.clone().add_(w, s); }},
      {"aten::fill_", [](const T& w, double s) { return torch::zeros_like(w).fill_(s); }},
      {"aten::addcmul_", [](const T& w, double s) { return w.clone().addcmul_(w, w, s); }},
      {"aten::mul_", [](const T& w, double s) { return w.clone().mul_(torch::tensor(s)); }},
      {"aten::_foreach_mul", [](const T& w, double s) { return at::_foreach_mul({w}, s)[0]; }},
      {"aten::_foreach_add",
       [](const T& w, double s) {
         return at::_foreach_add({w, w}, std::vector<at::Scalar>{1.5, s})[1];
       }},
  };
  return expressions;
}

double own_number(int64_t rank) { return own_rows(rank).abs().max().item<double>(); }

class OwnNumbers : public Worlds {};

TEST_P(OwnNumbers, AreErrorsOnAllRanksWhereWhatTheyWentIntoBecomesWhole) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    if (mesh.size() == 1) return;
    const auto sharded = sharded_layer(mesh);
    const auto weight = sharded->parameters()[0];
    torch::NoGradGuard no_grad;
    const auto before = full_value(weight);
    for (const auto& [taken_by, value] : expressions_of_numbers()) {
      const auto error =
          message_of<c10::ValueError>([&] { full_value(value(weight, own_number(rank))); });
      EXPECT_THAT(error, AllOf(HasSubstr("is not the same on all ranks"),
                               ContainsRegex("were given to [^.]*" + taken_by + "[,.]")))
          << taken_by;
    }
    EXPECT_TRUE(full_value(weight).equal(before));
  });
}

TEST_P(OwnNumbers, AreErrorsBesideARanksOwnTensorsAndInValuesToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    if (mesh.size() == 1) return;
    const auto sharded = sharded_layer(mesh);
    const auto weight = sharded->parameters()[0];
    torch::NoGradGuard no_grad;
    const auto own = own_rows(rank);
    const double s = own_number(rank);
    const auto scaled = weight * s;
    const std::vector<std::function<void()>> mistakes{
        [&] { torch::linear(own / s, scaled); },
        [&] { own.slice(0, 0, 5) + scaled; },
        [&] { scaled.sum().item<double>(); },
        [&] { (s * weight.pow(2).sum()).item<double>(); },
        [&] { weight.norm(s).item<double>(); },
        [&] { DTensor(scaled).redistribute({Replicate{}}); },
        [&] { torch::equal(scaled, DTensor(weight).redistribute({Replicate{}})); },
        [&] { scaled.mm(weight.t() * 2).sum(0).max().item<double>(); },
    };
    for (size_t i = 0; i < mistakes.size(); ++i)
      EXPECT_THAT(message_of<c10::ValueError>(mistakes[i]),
                  HasSubstr("is not the same on all ranks"))
          << i;
    EXPECT_TRUE((weight * torch::tensor(s)).equal(full_value(weight) * s));
  });
}

// Constants, and what follows from them, cost nothing and say nothing.
TEST_P(OwnNumbers, ThatAreTheSameGiveTheUnshardedValues) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh), plain = layer();
    torch::NoGradGuard no_grad;
    for (const auto& [taken_by, value] : expressions_of_numbers()) {
      const auto of_sharded = full_value(value(sharded->parameters()[0], 1.25));
      EXPECT_TRUE(of_sharded.allclose(value(plain->parameters()[0], 1.25))) << taken_by;
    }
  });
}

// Ranks may look at what they hold as they like.
TEST_P(OwnNumbers, MayGoIntoWhatNeverBecomesWhole) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh);
    const auto weight = sharded->parameters()[0];
    torch::NoGradGuard no_grad;
    const double s = own_number(rank);
    const auto local = DTensor(weight).to_local();
    EXPECT_TRUE(DTensor(weight * s).to_local().equal(local * s));
    const auto average = torch::zeros_like(weight);
    for (int64_t again = 0; again < rank; ++again) average.mul_(s).add_(weight, s);
    EXPECT_TRUE(full_value(average.zero_()).equal(torch::zeros({5, 16})));
    int64_t moved = 0;
    const internal::CommListener listener([&](const internal::CommEvent&) { ++moved; });
    full_value(weight * 2);
    EXPECT_EQ(moved, mesh.size() == 1 ? 0 : 1);
  });
}

// Machines that round otherwise compute a schedule otherwise.
TEST_P(OwnNumbers, ThatDifferByRoundingAreTheSame) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto sharded = sharded_layer(mesh);
    torch::NoGradGuard no_grad;
    const double s = 0.3 * (1 + 1e-15 * static_cast<double>(rank));
    EXPECT_EQ(full_value(sharded->parameters()[0] * s).dim(), 2);
  });
}

INSTANTIATE_WORLDS(OwnNumbers, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
