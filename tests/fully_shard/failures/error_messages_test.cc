// Every refusal names what was wrong, and leaves the module as it was.
#include "tests/fully_shard/support/decoder.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct OneParameter : torch::nn::Module {
  explicit OneParameter(torch::Tensor tensor)
      : weight(register_parameter("weight", std::move(tensor))) {}
  torch::Tensor weight;
};

TEST(Errors, AModuleOnTheStack) {
  on_one_rank([](const DeviceMesh& mesh) {
    PairImpl model;
    expect_error<c10::ValueError>(
        [&] { fully_shard(model, mesh); },
        AllOf(HasSubstr("PairImpl"), HasSubstr("std::make_shared"),
              HasSubstr("fully_shard({model.first.get(), model.second.get()})")));
    fully_shard({model.first.get(), model.second.get()}, mesh);
    model.forward(torch::ones({1, 4})).sum().backward();
    EXPECT_TRUE(is_dtensor(model.parameters()[3].grad()));
  });
}

TEST(Errors, AContainerWithoutForward) {
  on_one_rank([](const DeviceMesh& mesh) {
    torch::nn::ModuleList list(torch::nn::Linear(2, 2));
    expect_error<c10::ValueError>([&] { fully_shard(list, mesh); },
                                  HasSubstr("container without forward"));
  });
}

TEST(Errors, ASecondApplication) {
  on_one_rank([](const DeviceMesh& mesh) {
    torch::nn::Linear linear(2, 2);
    fully_shard(linear, mesh);
    expect_error<c10::ValueError>([&] { fully_shard(linear, mesh); }, HasSubstr("already applied"));
  });
}

TEST(Errors, TopDownOrder) {
  on_one_rank([](const DeviceMesh& mesh) {
    Decoder model(4, 1);
    fully_shard(model, mesh);
    expect_error<c10::ValueError>([&] { fully_shard(model->blocks[0], mesh); },
                                  AllOf(HasSubstr("bottom-up"), HasSubstr("norm.weight")));
  });
}

TEST(Errors, AScalarParameterLeavesTheModuleAsItWas) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto module = std::make_shared<OneParameter>(torch::ones({}));
    expect_error<c10::ValueError>([&] { fully_shard(module, mesh); },
                                  AllOf(HasSubstr("'weight'"), HasSubstr("scalar")));
    EXPECT_FALSE(is_fsdp_module(*module));
    EXPECT_FALSE(is_dtensor(module->parameters()[0]));
  });
}

TEST(Errors, AScalarParameterFurtherDownIsNamedByItsPath) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    Decoder model(4, 1);
    model->blocks[0]->register_parameter("scale", torch::ones({}));
    const auto advice = AllOf(HasSubstr("'block0.scale'"), HasSubstr("scalar"),
                              HasSubstr("one dimension and one element"));
    expect_error<c10::ValueError>([&] { fully_shard(model, mesh); }, advice);
    EXPECT_FALSE(is_fsdp_module(*model));
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(is_dtensor(parameter));
  });
}

TEST(Errors, ANonContiguousParameter) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto module = std::make_shared<OneParameter>(torch::ones({3, 2}).t());
    expect_error<c10::ValueError>([&] { fully_shard(module, mesh); }, HasSubstr("not contiguous"));
  });
}

TEST(Errors, ParametersThatShareMemoryOnly) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto module = std::make_shared<OneParameter>(torch::ones({4}));
    module->register_parameter("alias", module->weight.detach().view({2, 2}));
    expect_error<c10::ValueError>(
        [&] { fully_shard(module, mesh); },
        AllOf(HasSubstr("'weight'"), HasSubstr("'alias'"), HasSubstr("share memory")));
  });
}

TEST(Errors, AParameterWithAGradient) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto module = std::make_shared<OneParameter>(torch::ones({4}));
    module->weight.sum().backward();
    expect_error<c10::ValueError>([&] { fully_shard(module, mesh); }, HasSubstr("zero_grad()"));
  });
}

TEST(Errors, AnIgnoredTensorThatIsNoParameter) {
  on_one_rank([](const DeviceMesh& mesh) {
    torch::nn::Linear linear(2, 2);
    expect_error<c10::ValueError>(
        [&] { fully_shard(linear, mesh, {.ignored_params = {torch::ones({2})}}); },
        HasSubstr("ignored_params[0]"));
  });
}

TEST(Errors, AnIgnoredTensorThatAUnitShards) {
  on_one_rank([](const DeviceMesh& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    auto* const below = model->ptr(0)->as<torch::nn::Linear>();
    fully_shard(*below, mesh);
    for (const auto& sharded : {below->weight, below->parameters()[0]}) {
      expect_error<c10::ValueError>(
          [&] { fully_shard(model, mesh, {.ignored_params = {sharded}}); },
          AllOf(HasSubstr("ignored_params[0] of shape [2, 2]"), HasSubstr("sharded by a unit")));
    }
    EXPECT_FALSE(is_fsdp_module(*model));
  });
}

TEST(Errors, RawAccessToAShardedMember) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    Decoder model(4, 1);
    shard_decoder(*model, mesh);
    auto& weight = model->blocks[0]->up->weight;
    expect_error<c10::Error>([&] { weight.data_ptr<float>(); },
                             AllOf(HasSubstr("block0.up.weight"), HasSubstr("full_tensor()")));
    expect_error<c10::ValueError>(
        [&] {
          weight.set_data(torch::ones({8, 4}));
        },
        HasSubstr("block0.up.weight"));
  });
}

TEST(Errors, EqualSizedUnitsTouchedInOppositeOrderAreNamedOnEveryRank) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto model = build_seeded([] { return decoder_model(4, 2); });
    shard_decoder(*model.module, mesh);
    auto& blocks = dynamic_cast<DecoderImpl&>(*model.module).blocks;
    for (auto unit : fsdp_modules(*model.module))
      unit.set_modules_to_forward_prefetch({unit});  // no other prefetch
    torch::NoGradGuard no_grad;
    expect_error<c10::Error>(
        [&] { blocks[static_cast<size_t>(rank)]->up->weight.sum(); },
        AllOf(HasSubstr("'block0'"), HasSubstr("'block1'"), HasSubstr("out of order")));
  });
}

// Neither has a path that the other does not have.
TEST(Errors, TwoRootsTouchedInOppositeOrderAreToldApartOnEveryRank) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    std::vector<torch::nn::Linear> roots{make_linear(4, 4), make_linear(4, 4)};
    for (auto& root : roots) fully_shard(root, mesh);
    torch::NoGradGuard no_grad;
    expect_error<c10::Error>(
        [&] { roots[static_cast<size_t>(rank)]->weight.sum(); },
        AllOf(HasSubstr("all-gather of unit '(root)' (number 0)"),
              HasSubstr("all-gather of unit '(root)' (number 1)"), HasSubstr("out of order")));
  });
}

}  // namespace
}  // namespace fsdp::testing
