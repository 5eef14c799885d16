// What fully_shard refuses about modules and memory, and parameters that come too late.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/pair.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::nn::Linear;

void expect_untouched(const torch::nn::Module& module) {
  EXPECT_FALSE(is_fsdp_module(module));
  for (const auto& parameter : module.parameters()) EXPECT_FALSE(is_dtensor(parameter));
}

TEST(Validation, NullModulesAreNamedByPosition) {
  on_one_rank([](const DeviceMesh& mesh) {
    Linear linear(2, 2);
    EXPECT_THAT(message_of([&] {
                  fully_shard(std::vector<torch::nn::Module*>{linear.get(), nullptr}, mesh);
                }),
                HasSubstr("module 1 of 2 is null"));
    expect_untouched(*linear);
    const std::shared_ptr<torch::nn::LinearImpl> none;
    EXPECT_THAT(message_of([&] { fully_shard(none, mesh); }), HasSubstr("is null"));
  });
}

TEST(Validation, EveryContainerWithoutForwardIsRefusedByType) {
  on_one_rank([](const DeviceMesh& mesh) {
    using namespace torch::nn;
    const auto refused = [&](Module& module, const char* type) {
      EXPECT_THAT(message_of([&] { fully_shard(module, mesh); }),
                  AllOf(HasSubstr(type), HasSubstr("container without forward")));
    };
    ModuleList list(Linear(2, 2));
    ModuleDict dict;
    ParameterList parameters;
    ParameterDict named;
    refused(*list, "ModuleListImpl");
    refused(*dict, "ModuleDictImpl");
    refused(*parameters, "ParameterListImpl");
    refused(*named, "ParameterDictImpl");
  });
}

TEST(Validation, ABufferThatSharesAParametersMemoryIsNamed) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    model->second->register_buffer("alias", model->first->weight.detach());
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("parameter 'first.weight'"), HasSubstr("buffer 'second.alias'"),
                      HasSubstr("share memory")));
    expect_untouched(*model);
  });
}

TEST(Validation, MemorySharedAcrossUnitsIsRefusedWhicheverIsShardedFirst) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    model->second->weight.set_data(model->first->weight.data());
    EXPECT_THAT(message_of([&] { fully_shard(model->first, mesh); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("outside of this module")));
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("'second.weight'")));
    expect_untouched(*model);
    Pair later;
    fully_shard(later->first, mesh);
    later->second->register_parameter("alias", later->first->weight.detach().view({16}));
    EXPECT_THAT(
        message_of([&] { fully_shard(later, mesh); }),
        AllOf(HasSubstr("'second.alias'"), HasSubstr("'weight'"), HasSubstr("another unit")));
    expect_untouched(*later->second);
  });
}

TEST(Validation, AViewThatTheModelKeepsIsRefusedUntilItIsReleased) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    auto kept = model->first->weight.detach().t();
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("a view that the model keeps"),
                      HasSubstr("a graph that is still alive"), HasSubstr("Release it first")));
    expect_untouched(*model);
    kept.reset();
    EXPECT_NO_THROW(fully_shard(model, mesh));
  });
}

TEST(Validation, ALiveGraphIsRefusedUntilItIsReleased) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    auto loss = model(torch::ones({1, 4})).sum();
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("a graph that is still alive")));
    expect_untouched(*model);
    loss.reset();
    EXPECT_NO_THROW(fully_shard(model, mesh));
  });
}

TEST(Validation, AParameterThatIsAViewOfNothingElseIsAccepted) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    model->register_parameter("scale", torch::ones({4}).view({4, 1}));
    EXPECT_NO_THROW(fully_shard(model, mesh));
  });
}

TEST(Validation, ErrorsOnASliceOfAMeshPrintTheGlobalRank) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
    const auto dp = mesh["dp"];
    const auto here = "rank " + std::to_string(rank) + ")";
    Pair model;
    model->register_parameter("scalar", torch::ones({}));
    EXPECT_THAT(message_of([&] { fully_shard(model, dp); }), HasSubstr(here));
    Pair other;
    fully_shard(other->first, dp);
    fully_shard(other->second, mesh["pp"]);
    fully_shard(other, dp);
    other(torch::ones({1, 4})).sum().backward();
    other->first->bias = torch::zeros({4});
    EXPECT_THAT(message_of([&] {
                  other(torch::ones({1, 4})).sum().backward();
                }),
                AllOf(HasSubstr("'first.bias'"), HasSubstr(here)));
  });
}

class LateParameters : public ::testing::TestWithParam<int64_t> {
 protected:
  void on_ranks(const std::function<void(const DeviceMesh&)>& body) const {
    run_ranks(GetParam(), [&](int64_t) { body(init_device_mesh(torch::kCPU, {GetParam()})); });
  }
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

INSTANTIATE_TEST_SUITE_P(Worlds, LateParameters, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdp::testing
