// Parameters that are registered below a unit once it is one.
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class LateParameters : public Worlds {
 protected:
  // A sharded pair that has had a step, whose first layer then got a plain parameter.
  static Pair with_late_parameter(const DeviceMesh& mesh) {
    Pair model;
    fully_shard(model->first, mesh);
    fully_shard(model, mesh);
    step(model);
    model->first->register_parameter("late", torch::ones({3}));
    return model;
  }
  static void step(Pair& model) { model(torch::ones({2, 4})).sum().backward(); }
};

TEST_P(LateParameters, AreAnErrorOnAllRanksWhetherOrNotTheyAreUsed) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = with_late_parameter(mesh);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(
          message_of([&] { step(model); }),
          AllOf(HasSubstr("'first.late'"), HasSubstr("unit 'first'"), HasSubstr("fully_shard"),
                HasSubstr("set_requires_grad(false)"), HasSubstr("FSDPModule::ignore"),
                HasSubstr("rank " + std::to_string(mesh.rank()))));
    }
    EXPECT_TRUE(model->second->parameters()[0].grad().defined()) << "the others have theirs";
  });
}

TEST_P(LateParameters, MayBeFrozenOrIgnored) {
  on_ranks([](const DeviceMesh& mesh) {
    auto frozen = with_late_parameter(mesh);
    frozen->first->named_parameters()["late"].set_requires_grad(false);
    EXPECT_NO_THROW(step(frozen));
    auto ignored = with_late_parameter(mesh);
    get_fsdp_module(*ignored).ignore({ignored->first->named_parameters()["late"]});
    EXPECT_NO_THROW(step(ignored)) << "the root speaks for the units below it";
    Pair from_the_start;
    fully_shard(from_the_start, mesh, {.ignored_params = {from_the_start->first->weight}});
    EXPECT_NO_THROW(step(from_the_start));
  });
}

TEST_P(LateParameters, OfAnAdapterThatIsShardedAfterwardsTrain) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    fully_shard(model, mesh);
    step(model);
    auto adapter = make_linear(4, 4);
    model->second->register_module("adapter", adapter);
    const auto adapted_step = [&] {
      (model(torch::ones({2, 4})) + adapter(torch::ones({2, 4}))).sum().backward();
    };
    EXPECT_THAT(message_of(adapted_step), HasSubstr("'second.adapter.weight'"));
    adapter->zero_grad();
    fully_shard(adapter, mesh);
    EXPECT_NO_THROW(adapted_step());
    const auto& gradient = adapter->parameters()[1].grad();
    EXPECT_TRUE(torch::equal(DTensor(gradient).full_tensor(), torch::full({4}, 2.0f)));
  });
}

TEST_P(LateParameters, IgnoringWhatAUnitHasIsAnError) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    auto unit = fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { unit.ignore({model->first->weight}); }),
                HasSubstr("'first.weight', which is sharded already"));
    EXPECT_THAT(message_of([&] { unit.ignore({Tensor()}); }), HasSubstr("undefined"));
  });
}

INSTANTIATE_WORLDS(LateParameters, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
