// What plain tensors are beside a DTensor that comes from a parameter, and beside others.
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

class ParameterOwner final : public internal::DTensorOwner {
 public:
  const std::string* parameter_name() const override { return &name_; }
  void before_write(const at::Tensor&) override {}
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

 private:
  std::string name_ = "weight";
};

// On two ranks: a parameter cut along dimension 0, its whole value, and this rank's own.
struct ParameterAndOthers {
  explicit ParameterAndOthers(int64_t rank)
      : mesh(init_device_mesh(c10::kCPU, {2})),
        whole(at::arange(10.0).view({5, 2})),
        other(distribute_tensor(whole, mesh, {Shard{0}})),
        parameter(internal::make_dtensor(DTensor(other).to_local(), internal::spec_of(other),
                                         c10::make_intrusive<ParameterOwner>())),
        own(at::full({5, 2}, static_cast<double>(rank + 1))) {}

  DeviceMesh mesh;
  at::Tensor whole, other, parameter, own;
};

void on_two_ranks(const std::function<void(const ParameterAndOthers&)>& body) {
  testing::run_ranks(2, [&](int64_t rank) { body(ParameterAndOthers(rank)); });
}

bool is_marked(const at::Tensor& tensor) { return internal::meta_of(tensor).from_parameter; }

TEST(ImplicitReplication, IsThisRanksOwnBesideAParameter) {
  on_two_ranks([](const ParameterAndOthers& t) {
    EXPECT_TRUE(at::mm(t.own.t(), t.parameter).equal(at::mm(t.own.t(), t.whole)));
    EXPECT_TRUE(at::huber_loss(t.own, t.parameter).equal(at::huber_loss(t.own, t.whole)));
    EXPECT_TRUE(t.parameter.add(t.own).equal(t.whole + t.own));
    EXPECT_TRUE(t.own.clone().add_(t.parameter).equal(t.whole + t.own));
    EXPECT_TRUE(t.parameter.mul(t.own.sum()).equal(t.whole * t.own.sum()));
    EXPECT_TRUE(at::addcmul(t.other, t.parameter, t.own).equal(t.whole + t.whole * t.own));
  });
}

TEST(ImplicitReplication, CountsAsReplicatedBesideOthers) {
  on_two_ranks([](const ParameterAndOthers& t) {
    EXPECT_TRUE(is_dtensor(t.other + t.own));
    EXPECT_TRUE(is_dtensor(t.other * at::scalar_tensor(2)));
    EXPECT_FALSE(is_marked(t.other + t.own));
  });
}

TEST(ImplicitReplication, NumbersOfTheCodeAreNone) {
  on_two_ranks([](const ParameterAndOthers& t) {
    EXPECT_TRUE(is_dtensor(t.parameter * 2));
    EXPECT_TRUE(is_dtensor(1 - t.parameter));
    EXPECT_TRUE(is_dtensor(at::pow(2, t.parameter)));
  });
}

TEST(ImplicitReplication, WhatIsMadeOfAParameterCarriesTheMark) {
  on_two_ranks([](const ParameterAndOthers& t) {
    EXPECT_FALSE(is_marked(t.other));
    EXPECT_FALSE(is_marked(t.other.t() * 2));
    EXPECT_TRUE(is_marked(t.parameter));
    for (const at::Tensor& made : std::vector<at::Tensor>{
             t.parameter * 2, t.parameter.sum(), t.parameter.t(), t.parameter.detach(),
             t.parameter.clone(), at::zeros_like(t.parameter), t.parameter.to(at::kDouble),
             t.other + t.parameter, at::cat({t.other, t.parameter}), t.parameter.slice(0, 1, 2),
             at::_foreach_mul({t.parameter}, 2)[0], t.parameter.norm(), t.parameter.softmax(0),
             DTensor(t.parameter).redistribute({Replicate{}})}) {
      EXPECT_TRUE(is_marked(made));
      EXPECT_TRUE(is_marked(made.detach() * 2));
    }
  });
}

TEST(ImplicitReplication, WhatAParameterIsWrittenToCarriesTheMark) {
  on_two_ranks([](const ParameterAndOthers& t) {
    for (const auto& write : std::vector<std::function<void(const at::Tensor&)>>{
             [&](const at::Tensor& to) { to.copy_(t.parameter); },
             [&](const at::Tensor& to) { to.add_(t.parameter, 2); },
             [&](const at::Tensor& to) { to.lerp_(t.parameter, 0.5); },
             [&](const at::Tensor& to) { to.clamp_min_(t.parameter); },
             [&](const at::Tensor& to) {
               at::_foreach_add_({to}, std::vector<at::Tensor>{t.parameter});
             }}) {
      const at::Tensor written = t.other.clone();
      write(written);
      EXPECT_TRUE(is_marked(written));
      EXPECT_FALSE(is_dtensor(written + t.own));
    }
    EXPECT_FALSE(is_marked(t.other));
  });
}

TEST(ImplicitReplication, WhatIsWrittenKeepsItsPartOfWhatRanksHaveAlike) {
  on_two_ranks([](const ParameterAndOthers& t) {
    const at::Tensor alike = at::arange(2.0);
    const at::Tensor written = t.parameter.clone();
    written.mul_(alike).add_(at::scalar_tensor(3));
    EXPECT_TRUE(DTensor(written).full_tensor().equal(t.whole * alike + 3));
    for (const auto& mistake : std::vector<std::function<void()>>{
             [&] { written.mul_(t.own); }, [&] { t.parameter.mul_(t.own); },
             [&] { t.parameter.sum().add_(t.own.sum()); },
             [&] {
               auto out = t.parameter.clone();
               at::add_out(out, t.parameter, t.own);
             },
             [&] { at::_foreach_add_({written}, std::vector<at::Tensor>{t.own}); }}) {
      EXPECT_THAT(message_of<c10::ValueError>(mistake), HasSubstr("is not the same on all ranks"));
    }
    EXPECT_TRUE(DTensor(written).full_tensor().equal(t.whole * alike + 3));
  });
}

}  // namespace
}  // namespace fsdp
