// What fully_shard refuses about modules and memory.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
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

}  // namespace
}  // namespace fsdp::testing
