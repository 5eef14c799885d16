// A member that the model reassigned after fully_shard is reported by name; whatever else
// models do with handles is not.
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

// Registers a parameter and keeps no member.
struct RegistryOnly : torch::nn::Module {
  RegistryOnly() { register_parameter("w", torch::ones({4, 4})); }
  Tensor forward(const Tensor& x) { return x.matmul(named_parameters()["w"]); }
};

struct ListModel : torch::nn::Module {
  ListModel() { list->append(torch::ones({4, 4}).set_requires_grad(true)); }
  Tensor forward(const Tensor& x) { return x.matmul(list[0]); }
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
};

Tensor data() { return torch::linspace(-1, 1, 8).view({2, 4}); }

template <class Model>
void step(Model& model) {
  model->forward(data()).pow(2).sum().backward();
}

template <class Model>
std::string message_of_step(Model& model) {
  return message_of([&] { step(model); });
}

class MemberWatch : public Worlds {
 protected:
  static Pair sharded_pair(const DeviceMesh& mesh) {
    Pair model;
    fully_shard(model->first, mesh);
    fully_shard(model->second, mesh);
    fully_shard(model, mesh);
    return model;
  }
};

TEST_P(MemberWatch, AReassignedMemberIsReportedByEveryBackward) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    step(model);
    model->first->weight = torch::eye(4).set_requires_grad(true);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(message_of_step(model),
                  AllOf(HasSubstr("parameter 'first.weight'"), HasSubstr("reassigned"),
                        HasSubstr("copy_"), HasSubstr("rank " + std::to_string(mesh.rank()))));
    }
    EXPECT_TRUE(model->second->named_parameters()["bias"].grad().defined())
        << "the others have theirs";
  });
}

TEST_P(MemberWatch, AMemberReassignedBeforeTheFirstStepIsReported) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    model->second->bias = torch::zeros({4});
    EXPECT_THAT(message_of_step(model), HasSubstr("parameter 'second.bias'"));
  });
}

TEST_P(MemberWatch, AMemberReassignedByForwardIsReportedOnceItsGraphIsGone) {
  on_ranks([](const DeviceMesh& mesh) {
    struct Doubling : torch::nn::Module {
      Tensor weight = register_parameter("weight", torch::ones({4}));
      Tensor bias = register_parameter("bias", torch::ones({4}));
      Tensor forward(const Tensor& x) {
        weight = (weight * 2).detach();
        return x * weight + bias;
      }
    };
    const auto model = std::make_shared<Doubling>();
    fully_shard(*model, mesh);
    EXPECT_THAT(message_of_step(model),
                AllOf(HasSubstr("parameter 'weight'"), HasSubstr("local variable")));
  });
}

TEST_P(MemberWatch, FreezingTheEntrySaysThatItIsMeant) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    model->first->weight = torch::eye(4);
    model->named_parameters()["first.weight"].set_requires_grad(false);
    EXPECT_NO_THROW(step(model));
  });
}

TEST_P(MemberWatch, AMemberReassignedBeforeShardingIsNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    model->first->weight = torch::eye(4);
    fully_shard(model, mesh);
    EXPECT_NO_THROW(step(model));
  });
}

TEST_P(MemberWatch, AHandleThatTheModelMovedElsewhereIsNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    std::swap(model->first->weight, model->second->weight);
    EXPECT_NO_THROW(step(model));
    const auto base = model->first->weight;  // as low-rank adapters do
    for (int i = 0; i < 2; ++i) {
      model->first->weight = base + 1;
      EXPECT_NO_THROW(step(model));
    }
  });
}

TEST_P(MemberWatch, HandlesThatWereOnlyTheCallersAreNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    Pair model;
    const auto list = model->register_module("list", std::make_shared<ListModel>());
    const auto bare = model->register_module("bare", std::make_shared<RegistryOnly>());
    auto handles =
        model->parameters();  // of the list's and the bare module's parameters the only ones
    fully_shard(model, mesh);
    handles.clear();
    step(bare);
    EXPECT_NO_THROW(step(model)) << "the list was not used yet";
    EXPECT_NO_THROW(step(list));
    EXPECT_TRUE(list->parameters()[0].grad().defined());
    EXPECT_TRUE(bare->parameters()[0].grad().defined());
  });
}

TEST_P(MemberWatch, AReplacedModuleIsReportedForItsNewParameters) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    const auto entries = model->parameters();  // an optimizer keeps them
    model->first = model->replace_module("first", make_linear(4, 4));
    EXPECT_THAT(message_of_step(model),
                AllOf(HasSubstr("parameter 'first.weight'"), HasSubstr("after fully_shard")));
    model->first->zero_grad();
    fully_shard(model->first, mesh);
    EXPECT_NO_THROW(step(model));
  });
}

TEST_P(MemberWatch, AParameterThatWasRegisteredAnewIsReportedAsTheNewOne) {
  on_ranks([](const DeviceMesh& mesh) {
    struct Renewing : torch::nn::Module {
      Tensor weight = register_parameter("weight", torch::ones({4}));
      Tensor bias = register_parameter("bias", torch::ones({4}));
      Tensor forward(const Tensor& x) { return x * weight + bias; }
      void renew() { parameters_["weight"] = weight = torch::ones({4}).set_requires_grad(true); }
    };
    const auto model = std::make_shared<Renewing>();
    fully_shard(*model, mesh);
    const auto entries = model->parameters();  // an optimizer keeps them
    model->renew();
    EXPECT_THAT(message_of_step(model),
                AllOf(HasSubstr("parameter 'weight'"), HasSubstr("after fully_shard")));
  });
}

TEST_P(MemberWatch, ADeadModuleWhoseUnitIsAliveIsNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    auto other = make_linear(4, 4).ptr();
    const auto unit = fully_shard(*other, mesh);
    const auto entries = other->parameters();
    other.reset();
    EXPECT_NO_THROW(step(model));
  });
}

TEST_P(MemberWatch, ModulesThatTakeTheirMembersFromTheRegistryAreNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    torch::nn::LSTM lstm(4, 4);
    set_start_values(*lstm);
    fully_shard(lstm, mesh);
    lstm->to(torch::kDouble);  // its handles are the entries from here on
    for (int i = 0; i < 2; ++i) {
      const auto loss = std::get<0>(lstm->forward(data().to(torch::kDouble).unsqueeze(0))).sum();
      EXPECT_NO_THROW(loss.backward());
    }
  });
}

TEST_P(MemberWatch, SummonedParametersAreNotReported) {
  on_ranks([](const DeviceMesh& mesh) {
    auto model = sharded_pair(mesh);
    for (const bool offload : {false, true}) {
      {
        const SummonFullParams summon(
            *model, {.writeback = !offload, .rank0_only = offload, .offload_to_cpu = offload});
      }
      EXPECT_NO_THROW(step(model));
    }
  });
}

INSTANTIATE_WORLDS(MemberWatch, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
