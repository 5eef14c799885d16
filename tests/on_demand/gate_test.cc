// When the gate touches, pins, marks ready and synchronises, seen by a group that counts.
#include "on_demand/gate_key.h"
#include "tests/on_demand/hot_operators.h"
#include "tests/on_demand/small_group.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

at::Tensor parameter(at::IntArrayRef shape) { return at::randn(shape).set_requires_grad(true); }

void call(const HotOperator& op, torch::jit::Stack stack) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(op.name.c_str(), op.overload.c_str())
      .callBoxed(stack);
}

class EvictAfterEveryOperator {
 public:
  EvictAfterEveryOperator() { internal::set_evict_after_every_operator(true); }
  ~EvictAfterEveryOperator() { internal::set_evict_after_every_operator(false); }
};

TEST(Gate, AnOperatorTouchesAGroupOnceForAllItsParameters) {
  for (const auto& op : touching_operators()) {
    SCOPED_TRACE(op.name + "." + op.overload);
    std::vector<at::Tensor> parameters;
    for (const auto& shape : op.parameters) parameters.push_back(parameter(shape));
    const auto group = SmallGroup::take(parameters);
    call(op, op.call(at::randn(op.input), parameters));
    EXPECT_EQ(group->touches(), 1);
    EXPECT_FALSE(group->pinned());
  }
}

TEST(Gate, AViewTouchesNothingAndAnOperatorOnItDoes) {
  for (const auto& op : aliasing_operators()) {
    SCOPED_TRACE(op.name + "." + op.overload);
    const at::Tensor weight = parameter(op.parameters[0]);
    const auto group = SmallGroup::take({weight});
    call(op, op.call({}, {weight}));
    EXPECT_EQ(group->touches(), 0);
  }
  const at::Tensor weight = parameter({6, 4});
  const auto group = SmallGroup::take({weight});
  const at::Tensor view = weight.t().slice(0, 1).view({3, 6});
  EXPECT_EQ(group->touches(), 0);
  view.sum();
  EXPECT_EQ(group->touches(), 1);
}

TEST(Gate, ListsAndOptionalListsAreTouched) {
  const at::Tensor a = parameter({3, 2}), b = parameter({3, 2});
  const at::Tensor rows = at::tensor({2, 0});
  const at::Tensor rows_plain = rows.clone(), a_plain = a.detach().clone();
  const auto first = SmallGroup::take({a}), second = SmallGroup::take({b});
  const auto third = SmallGroup::take({rows});
  at::cat({a, at::ones({1, 2}), b});
  EXPECT_EQ(first->touches(), 1);
  EXPECT_EQ(second->touches(), 1);
  at::hstack({a, b});  // by the boxed kernel
  EXPECT_EQ(first->touches(), 2);
  EXPECT_EQ(second->touches(), 2);
  const at::Tensor picked = at::index(at::ones({2, 3}), {std::nullopt, rows});
  EXPECT_EQ(third->touches(), 1);
  EXPECT_EQ(picked.sizes(), at::IntArrayRef({2, 2}));
  EXPECT_TRUE(a.index({rows}).equal(a_plain.index({rows_plain})));
}

TEST(Gate, AllGroupsOfAnOperatorArePinnedBeforeTheFirstIsFilled) {
  for (const bool boxed : {false, true}) {
    SCOPED_TRACE(boxed);
    const at::Tensor a = parameter({3, 3}), b = parameter({3, 3});
    const auto first = SmallGroup::take({a}), second = SmallGroup::take({b});
    bool pinned = false;
    first->when_touched = [&] { pinned = first->pinned() && second->pinned(); };
    if (boxed) {
      at::dist(a, b);
    } else {
      at::mm(a, b);
    }
    EXPECT_TRUE(pinned);
    EXPECT_FALSE(first->pinned() || second->pinned());
  }
}

TEST(Gate, AThrowingTouchLeavesNothingPinned) {
  const at::Tensor a = parameter({3, 3}), b = parameter({3, 3});
  const auto first = SmallGroup::take({a}), second = SmallGroup::take({b});
  second->when_touched = [] { TORCH_CHECK(false, "no"); };
  EXPECT_THROW(at::mm(a, b), c10::Error);
  EXPECT_THROW(at::cat({a, b}), c10::Error);
  EXPECT_THROW(at::dist(a, b), c10::Error);
  EXPECT_FALSE(first->pinned() || second->pinned());
}

TEST(Gate, ASettledGroupIsNotTouchedInItsPass) {
  const at::Tensor weight = parameter({3, 3});
  const auto group = SmallGroup::take({weight});
  group->is_ready_after_touch = true;
  const at::Tensor x = at::ones({2, 3});
  for (int i = 0; i < 3; ++i) at::mm(x, weight);
  at::cat({x, weight});
  EXPECT_EQ(group->touches(), 1);
  {
    c10::NoGradGuard no_grad;  // another pass
    at::mm(x, weight);
    at::mm(x, weight);
  }
  EXPECT_EQ(group->touches(), 2);
  at::mm(x, weight);
  EXPECT_EQ(group->touches(), 3);
  group->clear_ready();
  at::mm(x, weight);
  EXPECT_EQ(group->touches(), 4);
}

TEST(Gate, ABackwardIsAPassOfItsOwn) {
  const at::Tensor weight = parameter({3, 3});
  const auto group = SmallGroup::take({weight});
  group->is_ready_after_touch = true;
  const at::Tensor x = at::ones({2, 3}).set_requires_grad(true);
  const at::Tensor y = at::mm(x, weight);
  group->empty();
  y.sum().backward();  // reads the weight for the gradient of x
  EXPECT_EQ(group->touches(), 2);
  EXPECT_TRUE(x.grad().defined());
}

TEST(Gate, WritesAreAnnouncedToTheGroup) {
  const at::Tensor weight = parameter({3, 3});
  const auto group = SmallGroup::take({weight});
  c10::NoGradGuard no_grad;
  weight.add(1);
  EXPECT_TRUE(group->written().empty());
  weight.add_(1);
  weight.t().zero_();
  EXPECT_EQ(group->written(), (std::vector<int64_t>{0, 0}));
}

TEST(Gate, EvictAndPoisonModeEvictsAfterEveryOperatorWhateverItsKernel) {
  const EvictAfterEveryOperator mode;
  const at::Tensor weight = parameter({3, 3}), x = at::ones({2, 3});
  const auto group = SmallGroup::take({weight});
  at::mm(x, weight);
  EXPECT_EQ(group->evictions(), 1);
  at::cat({x, weight});
  EXPECT_EQ(group->evictions(), 2);
  weight.t();
  EXPECT_EQ(group->evictions(), 2);
  EXPECT_THROW(static_cast<void>(weight.const_data_ptr<float>()), c10::Error);
}

TEST(Gate, RequiresGradFollowsTheEntryAtTheNextOperatorViewsIncluded) {
  for (const bool watched : {false, true}) {
    SCOPED_TRACE(watched);
    const at::Tensor weight = parameter({3, 3}), x = at::ones({2, 3});
    const auto group = SmallGroup::take({weight});
    if (watched) group->watch_requires_grad({weight});
    group->entries()[0].set_requires_grad(false);
    EXPECT_FALSE(at::mm(x, weight).requires_grad());
    group->entries()[0].set_requires_grad(true);
    EXPECT_TRUE(weight.t().requires_grad());
    group->entries()[0].set_requires_grad(false);
    EXPECT_FALSE(at::cat({weight, weight}).requires_grad());
  }
}

TEST(Gate, AWatchedMemberIsSynchronisedOnlyWhenItsFlagDiffers) {
  const at::Tensor weight = parameter({3, 3}), x = at::ones({2, 3});
  const auto group = SmallGroup::take({weight});
  at::mm(x, weight);
  EXPECT_EQ(group->synchronizations(), 1);
  group->watch_requires_grad({weight});
  group->reset_counts();
  at::mm(x, weight);
  at::mm(x, weight.t());
  EXPECT_EQ(group->synchronizations(), 0);
  group->entries()[0].set_requires_grad(false);
  at::mm(x, weight);
  at::mm(x, weight);
  EXPECT_EQ(group->synchronizations(), 1);
}

TEST(Gate, IsInstalledAnyNumberOfTimes) {
  internal::install_gate();
  internal::install_gate();
  const at::Tensor weight = parameter({3, 3});
  const auto group = SmallGroup::take({weight});
  at::mm(weight, weight);
  EXPECT_EQ(group->touches(), 1);
}

}  // namespace
}  // namespace fsdp::testing
