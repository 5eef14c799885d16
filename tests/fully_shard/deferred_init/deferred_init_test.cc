// deferred_init() and materialize(): the values, what is held when, and what is refused.
#include "dtensor/manual_seed.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/deferred_init/seeded_builds.h"
#include "tests/fully_shard/support/module_zoo.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/put_on_meta.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

void expect_same_values(const torch::nn::Module& sharded, const torch::nn::Module& plain,
                        const std::string& what) {
  const auto expected = plain.named_parameters();
  const auto parameters = sharded.named_parameters();
  ASSERT_EQ(parameters.size(), expected.size()) << what;
  for (const auto& item : expected)
    EXPECT_TRUE(full_value(parameters[item.key()]).equal(item.value())) << what << item.key();
  for (const auto& item : plain.named_buffers())
    EXPECT_TRUE(sharded.named_buffers()[item.key()].equal(item.value())) << what << item.key();
}

// Values that depend on those of other parameters, on the order of draws and on views.
struct Entangled : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 6));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(6, 4));
  Tensor scale = register_parameter("scale", torch::tensor({1.0, 2.0, 3.0}));
  Tensor table = register_buffer("table", torch::arange(6).to(torch::kFloat).view({3, 2}).t());
  Tensor row = register_buffer("row", table[1]);

  Entangled() {
    const torch::NoGradGuard no_grad;
    second->weight.copy_(first->weight.t() * 2 + torch::randn({4, 6}));
    second->weight[1].zero_();
    second->bias.copy_(torch::cat({first->bias, first->bias}).slice(0, 3, 7));
    torch::nn::init::orthogonal_(first->weight);
    table.mul_(scale);
    scale.copy_(torch::dropout(scale.clone(), 0.5, /*train=*/true));
  }
};

void draw_normal(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  if (auto* linear = module.as<torch::nn::Linear>()) {
    linear->weight.normal_(0, 0.02);
    linear->bias.zero_();
  }
}

class DeferredInit : public Worlds {};

TEST_P(DeferredInit, GivesEveryLayerTheValuesOfAModelBuiltAtOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    for (const auto& each : zoo_cases()) {
      SCOPED_TRACE(each.name);
      const auto plain = built_from_seed(7, each.build);
      const auto deferred = built_from_seed(7, [&] { return deferred_init(each.build); });
      EXPECT_TRUE(deferred.state_after.equal(plain.state_after));
      auto& module = *deferred.built.module;
      for (const auto& parameter : module.parameters()) EXPECT_TRUE(parameter.is_meta());
      shard_whole(module, mesh);
      materialize(module);
      expect_same_values(module, *plain.built.module, "");
    }
  });
}

TEST_P(DeferredInit, FollowsValuesThatDependOnOthers) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] { return std::make_shared<Entangled>(); };
    const auto plain = built_from_seed(3, build);
    const auto deferred = built_from_seed(3, [&] { return deferred_init(build); });
    EXPECT_TRUE(deferred.state_after.equal(plain.state_after));
    auto& model = *deferred.built;
    fully_shard(model.first, mesh);
    fully_shard(model, mesh);
    materialize(model);
    expect_same_values(model, *plain.built, "");
    EXPECT_TRUE(model.table.is_same(model.named_buffers()["table"]));
    EXPECT_TRUE(model.row.is_alias_of(model.table));
  });
}

TEST_P(DeferredInit, KeepsWhatIsDoneBeforeFullyShard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto finish = [](Pair pair) {
      pair->apply(draw_normal);
      pair->second->to(torch::kDouble);
      return pair;
    };
    const auto plain = built_from_seed(4, [&] { return finish(Pair(4, 6, 3)); });
    auto deferred =
        built_from_seed(4, [&] { return finish(deferred_init([] { return Pair(4, 6, 3); })); });
    EXPECT_TRUE(deferred.state_after.equal(plain.state_after));
    fully_shard(deferred.built->first, mesh);
    fully_shard(deferred.built->second, mesh);
    materialize(*deferred.built);
    EXPECT_EQ(deferred.built->second->weight.scalar_type(), torch::kDouble);
    expect_same_values(*deferred.built, *plain.built, "");
  });
}

TEST_P(DeferredInit, ShardsShapesOnTheMetaDeviceAndHoldsNothing) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Pair(4, 6, 3); });
    fully_shard(model, mesh);
    const auto weight = model->parameters()[0];
    ASSERT_TRUE(is_dtensor(weight));
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({6, 4}));
    EXPECT_TRUE(weight.is_meta());
    EXPECT_TRUE(weight.requires_grad());
    EXPECT_EQ(counters(mesh).sharded_bytes, 0);
    torch::optim::AdamW optimizer(model->parameters());
    materialize(*model);
    EXPECT_GT(counters(mesh).sharded_bytes, 0);
    EXPECT_TRUE(model->parameters()[0].is_same(weight));
    EXPECT_TRUE(weight.is_cpu());
    EXPECT_TRUE(model->first->weight.is_cpu());
    EXPECT_TRUE(weight.requires_grad());
    const auto rows = (6 + world() - 1) / world();
    EXPECT_EQ(DTensor(weight).to_local().size(0), std::clamp<int64_t>(6 - rank * rows, 0, rows));
  });
}

TEST_P(DeferredInit, TrainsAsAModelBuiltAtOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] { return Pair(4, 6, 3); };
    auto at_once = built_from_seed(5, build).built;
    auto deferred = built_from_seed(5, [&] { return deferred_init(build); }).built;
    for (auto model : {at_once, deferred}) {
      fully_shard(model->first, mesh);
      fully_shard(model, mesh);
      torch::optim::AdamW optimizer(model->parameters());
      materialize(*model);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model->forward(torch::ones({2, 4})).pow(2).sum().backward();
        optimizer.step();
      }
    }
    expect_same_values(
        *deferred,
        *[&] {
          auto whole = build();
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < whole->parameters().size(); ++i)
            whole->parameters()[i].copy_(full_value(at_once->parameters()[i]));
          return whole;
        }(),
        "");
  });
}

struct Tied : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(8, 4));
  Tensor head = register_parameter("head", embedding->weight);
};

TEST_P(DeferredInit, KeepsTies) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] { return std::make_shared<Tied>(); };
    const auto plain = built_from_seed(6, build).built;
    const auto model = built_from_seed(6, [&] { return deferred_init(build); }).built;
    fully_shard(model->embedding, mesh);
    fully_shard(*model, mesh);
    materialize(*model);
    EXPECT_TRUE(model->head.is_same(model->embedding->weight));
    EXPECT_TRUE(model->named_parameters(/*recurse=*/false)["head"].is_same(
        model->embedding->parameters()[0]));
    EXPECT_TRUE(full_value(model->embedding->parameters()[0]).equal(plain->embedding->weight));
  });
}

TEST_P(DeferredInit, RanksThatDrewOtherValuesAreToldApart) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    const auto seed = static_cast<uint64_t>(rank);
    auto linear = built_from_seed(seed, [] {
                    return deferred_init([] { return torch::nn::Linear(4, 6); });
                  }).built;
    fully_shard(linear, mesh);
    materialize(*linear);
    const auto message = message_of([&] { linear(torch::ones({2, 4})); });
    EXPECT_THAT(message,
                HasSubstr(world() > 1 ? "started with other values" : "nothing was thrown"));
  });
}

TEST_P(DeferredInit, UsingParametersWithoutValuesIsRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Pair(4, 6, 3); });
    auto unit = fully_shard(model, mesh);
    const auto refused = AllOf(HasSubstr("have no values yet"), HasSubstr("'first.weight'"),
                               HasSubstr("'second.bias'"), HasSubstr("fsdp::materialize"));
    expect_error<c10::ValueError>([&] { model->forward(torch::ones({2, 4})); }, refused);
    expect_error<c10::ValueError>([&] { model->parameters()[0].add(1); }, refused);
    expect_error<c10::ValueError>([&] { DTensor(model->parameters()[0]).to_local(); }, refused);
    expect_error<c10::ValueError>([&] { torch::nn::init::ones_(model->parameters()[0]); }, refused);
    if (mesh.size() > 1) expect_error<c10::ValueError>([&] { unit.unshard(); }, refused);
    materialize(*model);
    EXPECT_NO_THROW(model->forward(torch::ones({2, 4})));
  });
}

INSTANTIATE_WORLDS(DeferredInit, 1, 2, 3);

TEST(DeferredModels, NeedNoUnits) {
  const auto build = [] { return std::make_shared<Entangled>(); };
  const auto plain = built_from_seed(3, build).built;
  const auto deferred = built_from_seed(3, [&] { return deferred_init(build); }).built;
  const auto weight = deferred->first->weight;
  materialize(*deferred);
  EXPECT_TRUE(weight.is_same(deferred->first->weight));
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(deferred->named_parameters()[item.key()].equal(item.value())) << item.key();
  deferred->first(torch::ones({2, 4})).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
  materialize(*deferred);  // nothing is left to do
}

TEST(DeferredModels, OfOneThreadMayBeEntangled) {
  auto first = deferred_init([] { return torch::nn::Linear(4, 4); });
  auto second = deferred_init([&] {
    torch::nn::Linear copy(4, 4);
    const torch::NoGradGuard no_grad;
    copy->weight.copy_(first->weight);
    return copy;
  });
  materialize(*first);
  materialize(*second);
  EXPECT_TRUE(first->weight.equal(second->weight));
}

TEST(DeferredModels, KeepValuesThatWereThereBefore) {
  std::vector<float> pretrained = {1, 2, 3, 4};
  const auto given = torch::from_blob(pretrained.data(), {2, 2});
  auto model = deferred_init([&] {
    torch::nn::Linear linear(2, 2);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(given);
    return linear;
  });
  pretrained[0] = 9;  // too late
  materialize(*model);
  EXPECT_TRUE(model->weight.equal(torch::tensor({{1.0F, 2.0F}, {3.0F, 4.0F}})));
}

TEST(DeferredModels, KeepSmallTensorsWrittenPastOperators) {
  const std::vector<float> values = {1, 2, 3};
  auto model = deferred_init([&] {
    torch::nn::Linear linear(3, 1);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(torch::tensor(values));  // which writes its memory itself
    return linear;
  });
  materialize(*model);
  EXPECT_TRUE(model->weight.equal(torch::tensor(values).view({1, 3})));
}

TEST(DeferredModels, DrawFromAGeneratorThatIsGiven) {
  auto generator = at::detail::createCPUGenerator(11);
  auto model = deferred_init([&] {
    torch::nn::Linear linear(2, 2);
    const torch::NoGradGuard no_grad;
    linear->weight.uniform_(0, 1, generator);
    return linear;
  });
  auto again = at::detail::createCPUGenerator(11);
  const auto expected = torch::empty({2, 2}).uniform_(0, 1, again);
  EXPECT_TRUE(generator.get_state().equal(again.get_state()));
  materialize(*model);
  EXPECT_TRUE(model->weight.equal(expected));
}

TEST_P(DeferredInit, DrawsFromTheGeneratorOfManualSeed) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] { return std::make_shared<Entangled>(); };
    manual_seed(3, mesh);
    const auto plain = build();
    const auto next = torch::rand({3});
    manual_seed(3, mesh);
    const auto deferred = deferred_init(build);
    EXPECT_TRUE(torch::rand({3}).equal(next));
    fully_shard(deferred->first, mesh);
    fully_shard(*deferred, mesh);
    manual_seed(4, mesh);  // what the program draws meanwhile
    const auto of_the_program = torch::rand({6});
    manual_seed(4, mesh);
    EXPECT_TRUE(torch::rand({3}).equal(of_the_program.slice(0, 0, 3)));
    materialize(*deferred);
    EXPECT_TRUE(torch::rand({3}).equal(of_the_program.slice(0, 3)));
    use_default_generator();
    expect_same_values(*deferred, *plain, "");
  });
}

TEST(DeferredModels, LeaveTheDefaultGeneratorAlone) {
  auto deferred = deferred_init([] {
    torch::nn::Linear linear(8, 8);
    const torch::NoGradGuard no_grad;
    // Dropout takes no generator.
    linear->weight.copy_(torch::dropout(torch::ones({8, 8}), 0.5, /*train=*/true));
    return linear;
  });
  torch::rand({3});  // what the program draws meanwhile
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  materialize(*deferred);
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(before));
}

TEST(DeferredModels, RefuseWhatNeedsValues) {
  const auto refused = [](const char* op) {
    return AllOf(HasSubstr("deferred_init"), HasSubstr(op));
  };
  expect_error<c10::ValueError>(
      [] { deferred_init([] { return torch::ones({2}).sum().item<float>(); }); },
      refused("aten::item"));
  expect_error<c10::ValueError>(
      [] { deferred_init([] { return torch::nonzero(torch::ones({2})); }); },
      refused("aten::nonzero"));
  expect_error<c10::ValueError>(
      [] { deferred_init([] { return torch::ones({2}, torch::kCUDA); }); }, refused("cuda"));
  const auto existing = torch::zeros({2});
  expect_error<c10::ValueError>(
      [&] { deferred_init([&] { return existing.copy_(torch::ones({2})); }); },
      refused("aten::copy_"));
  const auto raw = [](int64_t size) {
    return [size] { return torch::ones({size}).data_ptr<float>(); };
  };
  expect_error<c10::Error>([&] { deferred_init(raw(4)); }, refused("torch::from_blob"));
  const std::vector<float> values(2000);  // more than is kept aside
  expect_error<c10::Error>([&] { deferred_init([&] { return torch::tensor(values); }); },
                           refused("torch::from_blob"));
  const auto written_twice = [] {
    const auto tensor = torch::empty({2}).fill_(1);
    tensor.data_ptr<float>()[0] = 2;
    return tensor;
  };
  expect_error<c10::Error>([&] { deferred_init(written_twice); }, refused("torch::from_blob"));
  // What was refused leaves nothing behind.
  EXPECT_EQ(torch::ones({2}).sum().item<float>(), 2);
}

TEST(DeferredModels, FullyShardComesAfterTheConstructor) {
  on_one_rank([](const DeviceMesh& mesh) {
    expect_error<c10::ValueError>(
        [&] {
          deferred_init([&] {
            torch::nn::Linear linear(2, 2);
            fully_shard(linear, mesh);
            return linear;
          });
        },
        HasSubstr("inside of deferred_init"));
  });
}

class MetaModules : public Worlds {};

TEST_P(MetaModules, AreInitialisedModuleByModule) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    put_on_meta(*model);
    fully_shard(model->first, mesh);
    fully_shard(model, mesh);
    expect_error<c10::ValueError>([&] { materialize(*model); },
                                  AllOf(HasSubstr("'first.weight'"), HasSubstr("'second.bias'")));
    EXPECT_TRUE(model->parameters()[0].is_meta());
    std::vector<torch::nn::Module*> initialised;
    materialize(*model, [&](torch::nn::Module& module) {
      initialised.push_back(&module);
      auto* const linear = module.as<torch::nn::Linear>();
      linear->weight.fill_(static_cast<double>(initialised.size()));
      EXPECT_TRUE(linear->bias.equal(torch::zeros_like(linear->bias)));
    });
    EXPECT_EQ(initialised,
              (std::vector<torch::nn::Module*>{model->first.get(), model->second.get()}));
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(torch::full({6, 4}, 1.0)));
    EXPECT_TRUE(full_value(model->parameters()[2]).equal(torch::full({3, 6}, 2.0)));
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST_P(MetaModules, ThatExistOnlyInPartAreRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model(4, 6, 3);
    put_on_meta(*model->first);
    expect_error<c10::ValueError>([&] { fully_shard(model, mesh); },
                                  AllOf(HasSubstr("meta"), HasSubstr("'second.weight'")));
    EXPECT_FALSE(is_fsdp_module(*model));
  });
}

INSTANTIATE_WORLDS(MetaModules, 1, 2);

}  // namespace
}  // namespace fsdp::testing
