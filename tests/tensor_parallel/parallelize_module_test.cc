// Paths, styles and what is refused.
#include "dtensor/dtensor.h"
#include "tensor_parallel/internal/parameter_uses.h"
#include "tests/support/errors.h"
#include "tests/support/head.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <stdexcept>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

TEST(ParallelStyles, SayHowAParameterLies) {
  using internal::ModuleKind;
  using internal::parallel_parameter;
  const auto placement = [](const ParallelStyle& style, ModuleKind kind, const char* leaf,
                            std::vector<int64_t> shape) {
    return parallel_parameter(style, {kind, leaf, std::move(shape), "Module"}).placement;
  };
  const auto linear = ModuleKind::kProduct, table = ModuleKind::kEmbedding;
  EXPECT_EQ(placement(ColwiseParallel{}, linear, "weight", {8, 4}), Placement(Shard{0}));
  EXPECT_EQ(placement(ColwiseParallel{}, linear, "bias", {8}), Placement(Shard{0}));
  EXPECT_EQ(placement(ColwiseParallel{.unit = 2, .sections = 3}, linear, "weight", {12, 4}),
            Placement(Shard{0, 3, 2}));
  EXPECT_EQ(placement(ColwiseParallel{}, table, "weight", {8, 4}), Placement(Shard{1}));
  EXPECT_EQ(placement(RowwiseParallel{.unit = 4}, linear, "weight", {8, 4}),
            Placement(Shard{1, 1, 4}));
  EXPECT_EQ(placement(RowwiseParallel{}, linear, "bias", {8}), Placement(Replicate{}));
  EXPECT_EQ(placement(RowwiseParallel{}, table, "weight", {8, 4}), Placement(Shard{0}));
  EXPECT_EQ(placement(SequenceParallel{}, ModuleKind::kNorm, "weight", {8}),
            Placement(Replicate{}));
  EXPECT_EQ(placement(ShardParameter{Shard{-1}}, ModuleKind::kOther, "gain", {8, 4}),
            Placement(Shard{1}));
  EXPECT_THROW(placement(ColwiseParallel{.unit = 3}, linear, "weight", {8, 4}),
               std::invalid_argument);
  EXPECT_THROW(placement(ColwiseParallel{.unit = 0}, linear, "weight", {8, 4}),
               std::invalid_argument);
  EXPECT_THROW(placement(ShardParameter{Shard{2}}, linear, "weight", {8, 4}),
               std::invalid_argument);
  EXPECT_THROW(placement(ShardParameter{Partial{}}, linear, "weight", {8, 4}),
               std::invalid_argument);
  EXPECT_THROW(placement(RowwiseParallel{}, ModuleKind::kOther, "weight", {8}),
               std::invalid_argument);
}

struct Tied : torch::nn::Module {
  Tied()
      : table(register_module("table", torch::nn::Embedding(10, 4))),
        head(register_module("head", Head(table->weight))) {}
  at::Tensor forward(const at::Tensor& tokens) { return head(torch::tanh(table(tokens))); }

  torch::nn::Embedding table;
  Head head;
};

// The plan is refused, and the module is as it was.
void expect_refused(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                    const std::string& words) {
  const auto before = module.parameters();
  expect_error<c10::ValueError>([&] { parallelize_module(module, mesh, plan); }, HasSubstr(words));
  for (const at::Tensor& parameter : before) EXPECT_FALSE(is_dtensor(parameter));
}

torch::nn::Sequential make_small() {
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})),
                               torch::nn::Linear(4, 6), torch::nn::GELU());
}

class ParallelizeModule : public Worlds {};

TEST_P(ParallelizeModule, RefusesWhatThePlanCanNotMean) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = drawn(1, make_small);
    const auto refuse = [&](const ParallelPlan& plan, const std::string& words) {
      expect_refused(*model, mesh, {{"1", ColwiseParallel{}}, plan[0]}, words);
    };
    refuse({{"5", ColwiseParallel{}}}, "'5' matches no module and no parameter");
    refuse({{"2", ColwiseParallel{}}}, "'2' means the module '2'");
    refuse({{"1", ShardParameter{Shard{0}}}}, "ShardParameter is for a parameter");
    refuse({{"0", RowwiseParallel{}}}, "not the weight of a torch::nn::LayerNormImpl");
    refuse({{"1", ColwiseParallel{.unit = 4}}}, "parameter '1.weight' of shape [6, 4]");
    refuse({{"1.weight", ShardParameter{Shard{3}}}}, "dimension 3");
    refuse({{"1", SequenceParallel{}}},
           "'1.weight' of shape [6, 4]: SequenceParallel would change "
           "nothing for a torch::nn::LinearImpl");
    model->parameters()[2].mutable_grad() = torch::ones({6, 4}, torch::kFloat64);
    refuse({{"0", ReplicateParallel{}}}, "'1.weight' has a .grad");
  });
}

// A style that would change nothing where it stands.
TEST_P(ParallelizeModule, RefusesStylesWithoutEffect) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto convolution = drawn(1, [] {
      return torch::nn::Sequential(torch::nn::Conv1d(4, 4, 1), torch::nn::BatchNorm1d(4));
    });
    for (const char* name : {"0", "1"}) {
      expect_refused(*convolution, mesh, {{name, SequenceParallel{}}},
                     "SequenceParallel would change nothing for a torch::nn::");
      expect_refused(*convolution, mesh, {{name, ReplicateParallel{.input_layout = Replicate{}}}},
                     "the input_layout of ReplicateParallel would change nothing");
    }
    parallelize_module(convolution, mesh, {{"*", ReplicateParallel{}}});
  });
}

TEST_P(ParallelizeModule, NamesASequenceDimensionThatInputsLack) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = drawn(1, make_small);
    parallelize_module(model, mesh, {{"0", SequenceParallel{.sequence_dim = 5}}});
    expect_error<c10::ValueError>(
        [&] {
          model->forward(drawn_tensor(2, {2, 3, 4}));
        },
        HasSubstr("the style of parameter '0.weight' cuts dimension 5 of its input, which is of "
                  "shape [2, 3, 4]; allowed are -3 to 2"));
  });
}

TEST(ParallelizeModule, RefusesAMeshOfAnotherDeviceTypeNamingBoth) {
  run_ranks(1, [](int64_t) {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/1);
    const auto device_mesh = DeviceMesh::from_group(group, c10::kCUDA, {0});
    auto model = drawn(1, make_small);
    const ParallelPlan plan = {{"1", ColwiseParallel{}}};
    expect_refused(*model, device_mesh, plan,
                   "'1.weight' is on cpu but the mesh is of device type cuda");
  });
}

TEST_P(ParallelizeModule, RefusesASecondPlan) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = drawn(1, make_small);
    const ParallelPlan plan = {{"1", ColwiseParallel{}}};
    parallelize_module(model, mesh, plan);
    expect_error<c10::ValueError>([&] { parallelize_module(model, mesh, plan); },
                                  HasSubstr("'1.weight' is a DTensor already"));
  });
}

TEST_P(ParallelizeModule, LaterEntriesWin) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = drawn(1, make_small);
    parallelize_module(model, mesh, {{"*", ReplicateParallel{}}, {"1", ColwiseParallel{}}});
    const auto parameters = model->named_parameters();
    EXPECT_EQ(DTensor(parameters["0.weight"]).placements()[0], Placement(Replicate{}));
    EXPECT_EQ(DTensor(parameters["1.weight"]).placements()[0], Placement(Shard{0}));
    EXPECT_EQ(parameters["1.weight"].sizes(), (std::vector<int64_t>{6, 4}));
  });
}

INSTANTIATE_WORLDS(ParallelizeModule, 2, 3);

TEST(ParallelizeModule, NamesTheParameterThatDiffersBetweenRanks) {
  on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
    auto model = drawn(1, make_small);
    const torch::NoGradGuard no_grad;
    if (rank == 2) model->parameters()[3][0].add_(1);
    expect_refused(*model, mesh, {{"1", ColwiseParallel{}}},
                   "rank 2 has parameter '1.bias', Double");
  });
}

TEST(ParallelizeModule, RefusesAMeshOfTwoDimensions) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2});
    auto model = drawn(1, make_small);
    expect_refused(*model, mesh, {{"1", ColwiseParallel{}}}, "mesh has 2 dimensions");
  });
}

TEST(ParallelizeModule, TiedParametersAreOneMemberWithBothStyles) {
  on_ranks_of(2, [&](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return std::make_shared<Tied>(); };
    auto plain = drawn(5, make), parallel = drawn(5, make), mixed = drawn(5, make);
    parallelize_module(parallel, mesh, {{"table", RowwiseParallel{}}, {"head", ColwiseParallel{}}});
    EXPECT_TRUE(parallel->table->weight.is_same(parallel->head->weight));
    const at::Tensor tokens = torch::tensor({{1, 9, 3}, {0, 5, 9}});
    const at::Tensor wanted = plain->forward(tokens), found = parallel->forward(tokens);
    EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), 1e-12);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, 1e-12);
    expect_refused(*mixed, mesh, {{"table", ColwiseParallel{}}, {"head", ColwiseParallel{}}},
                   "it is tied, and its styles cut it as Shard(1) and as Shard(0)");
  });
}

}  // namespace
}  // namespace fsdp::testing
