// What one rank cannot set, no rank sets.
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

StateDict without(const StateDict& values, const std::string& name) {
  StateDict fewer;
  for (const auto& item : values) {
    if (item.key() != name) fewer.insert(item.key(), item.value());
  }
  return fewer;
}

void expect_filled_with(torch::nn::Module& model, int64_t seed) {
  SmallModel expected;
  fill(*expected, seed);
  const auto want = full_values(*expected);
  for (const auto& item : full_values(model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

struct AgreeingRun {
  explicit AgreeingRun(const DeviceMesh& mesh, int64_t seed) {
    fully_shard(model->first, mesh);
    fully_shard(model, mesh);
    fill(*model, seed);
    model->eval();
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                      torch::optim::AdamWOptions(0.25));
  }
  void step() {
    model->forward(torch::ones({4, 5})).pow(2).mean().backward();
    optimizer->step();
  }
  SmallModel model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

TEST(DictAgreement, ANameThatOneRanksDictLacksChangesNothingOnAnyRank) {
  for (const StateDictOptions form : {StateDictOptions{}, StateDictOptions{.full_state_dict = true},
                                      StateDictOptions{.local = true}}) {
    on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
      AgreeingRun from(mesh, 1), to(mesh, 2);
      auto values = get_model_state_dict(*from.model, form);
      const auto fewer = without(values, "last.bias");
      EXPECT_THAT(message_of<c10::ValueError>(
                      [&] { set_model_state_dict(*to.model, rank == 1 ? fewer : values, form); }),
                  AllOf(HasSubstr("set_model_state_dict: rank 1: missing in the dict: last.bias"),
                        Not(HasSubstr("rank 0: ")), Not(HasSubstr("rank 2: "))));
      expect_filled_with(*to.model, 2);
      set_model_state_dict(*to.model, values, form);
      expect_filled_with(*to.model, 1);
    });
  }
}

TEST(DictAgreement, EveryRankThatFailsIsTold) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicas", "shards"});
    AgreeingRun from(mesh, 1), to(mesh, 2);
    auto values = get_model_state_dict(*from.model, {.full_state_dict = true});
    if (rank == 3) values["frozen"] = torch::ones({4});
    if (rank == 0) values["unused"] = values["unused"].to(torch::kDouble);
    EXPECT_THAT(message_of([&] { set_model_state_dict(*to.model, values); }),
                AllOf(HasSubstr("rank 0: 'unused' is Float here and Double in the dict"),
                      HasSubstr("rank 3: 'frozen' has shape"), Not(HasSubstr("rank 1: "))));
    expect_filled_with(*to.model, 2);
  });
}

struct TwoNamesImpl : torch::nn::Module {
  TwoNamesImpl() {
    in = register_parameter("in", torch::zeros({4, 2}));
    out = register_parameter("out", in);
  }
  torch::Tensor in, out;
};
TORCH_MODULE(TwoNames);

TEST(DictAgreement, ATieThatDiffersInOneRanksRowsIsRefusedByAll) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    TwoNames model;
    fully_shard(model, mesh);
    auto whole = torch::ones({4, 2});
    StateDict values;
    values.insert("in", distribute_tensor(whole, mesh, {Shard{0}}));
    values.insert("out", distribute_tensor(whole, mesh, {Shard{0}}));
    if (rank == 1) DTensor(values["out"]).to_local().fill_(5);
    EXPECT_THAT(
        message_of([&] { set_model_state_dict(*model, values); }),
        AllOf(HasSubstr("rank 1: "), HasSubstr("different values"), Not(HasSubstr("rank 0: "))));
    EXPECT_TRUE(torch::equal(full_value(model->named_parameters()["in"]), torch::zeros({4, 2})));
  });
}

// The dense layer lies on all four ranks, the experts on two each.
TEST(DictAgreement, IsOverAllMeshesOfTheModel) {
  run_ranks(4, [](int64_t rank) {
    const auto meshes = init_device_mesh(torch::kCPU, {2, 2}, {"experts", "own"});
    const auto world = init_device_mesh(torch::kCPU, {4});
    for (const bool expert_first : {false, true}) {
      torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
      fully_shard(*(*model)[expert_first ? 0 : 1], meshes["own"]);
      fully_shard(*model, world);
      fill(*model, 2);
      const auto before = full_values(*model);
      auto values = get_model_state_dict(*model, {.full_state_dict = true});
      for (auto& item : values) item.value().add_(1);
      const auto fewer = without(values, "0.weight");
      EXPECT_THAT(
          message_of([&] { set_model_state_dict(*model, rank == 3 ? fewer : values); }),
          AllOf(HasSubstr("rank 3: missing in the dict: 0.weight"), Not(HasSubstr("rank 0: "))));
      for (const auto& item : full_values(*model)) {
        EXPECT_TRUE(torch::equal(item.value(), before[item.key()])) << item.key();
      }
    }
  });
}

TEST(DictAgreement, OptimizersKeepStateAndOptionsWhereOneRankCannotSetThem) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    AgreeingRun from(mesh, 1), to(mesh, 2);
    from.step();
    auto dict = get_optimizer_state_dict(*from.model, *from.optimizer);
    dict.param_groups[0].options["lr"] = 0.5;
    const auto refusal = [&](const OptimizerStateDict& mine, const StateDictOptions& form) {
      const auto text = message_of<c10::ValueError>(
          [&] { set_optimizer_state_dict(*to.model, *to.optimizer, mine, form); });
      EXPECT_TRUE(to.optimizer->state().empty());
      EXPECT_EQ(to.optimizer->param_groups()[0].options().get_lr(), 0.25);
      return text;
    };
    auto other = dict;
    if (rank == 1) other.param_groups[0].params.pop_back();
    EXPECT_THAT(refusal(other, {}), AllOf(HasSubstr("rank 1: missing in the dict: last.bias"),
                                          Not(HasSubstr("rank 0: "))));
    other = dict;
    if (rank == 0) other.param_groups[0].options = {{"lr", 0.5}, {"momentum", 0.9}};
    EXPECT_THAT(refusal(other, {}), AllOf(HasSubstr("rank 0: "), HasSubstr("and so is of no")));
    auto local = get_optimizer_state_dict(*from.model, *from.optimizer, {.local = true});
    if (rank == 1) local.state.at("first.weight").at("exp_avg") = torch::ones({2, 5});
    EXPECT_THAT(refusal(local, {.local = true}),
                AllOf(HasSubstr("rank 1: "), HasSubstr("which is not this rank's part")));
    set_optimizer_state_dict(*to.model, *to.optimizer, dict);
    EXPECT_EQ(to.optimizer->state().size(), from.optimizer->state().size());
    EXPECT_EQ(to.optimizer->param_groups()[0].options().get_lr(), 0.5);
  });
}

// Values that lie otherwise are moved by collectives, which a rank that fails does not
// join.
TEST(DictAgreement, ComesBeforeAnythingIsMoved) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    AgreeingRun from(mesh, 1), to(mesh, 2);
    from.step();
    auto dict = get_optimizer_state_dict(*from.model, *from.optimizer, {.full_state_dict = true});
    for (auto& [name, fields] : dict.state) {
      for (const std::string field : {"exp_avg", "exp_avg_sq"}) {
        const auto whole = fields.at(field).toTensor();
        const int64_t last = whole.dim() - 1;
        fields[field] = distribute_tensor(whole, mesh, {Shard{last}});
      }
    }
    auto other = dict;
    if (rank == 1) other.param_groups[0].params.pop_back();
    EXPECT_THAT(message_of([&] { set_optimizer_state_dict(*to.model, *to.optimizer, other); }),
                HasSubstr("set_optimizer_state_dict: rank 1: missing in the dict: last.bias"));
    EXPECT_TRUE(to.optimizer->state().empty());
    set_optimizer_state_dict(*to.model, *to.optimizer, dict);
    const auto want = get_optimizer_state_dict(*from.model, *from.optimizer);
    const auto got = get_optimizer_state_dict(*to.model, *to.optimizer);
    for (const auto& [name, fields] : want.state) {
      EXPECT_TRUE(torch::equal(full_value(got.state.at(name).at("exp_avg").toTensor()),
                               full_value(fields.at("exp_avg").toTensor())))
          << name;
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
