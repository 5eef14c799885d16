// HFSDP: with Outer::kShardOptimizer a model trains with the bits of hybrid sharding,
// while entries, gradients and the optimizer's state are cut over all ranks.
#include "fully_shard/params/shard_buffer.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Grid {
  int64_t outer, inner;
};

std::string name_of(const Grid& grid) {
  return std::to_string(grid.outer) + "x" + std::to_string(grid.inner);
}

DeviceMesh mesh_of(const Grid& grid) {
  return init_device_mesh(torch::kCPU, {grid.outer, grid.inner}, {"outer", "inner"});
}

FullyShardOptions with(Outer outer, FullyShardOptions options = {}) {
  options.outer = outer;
  return options;
}

constexpr int64_t kBlocks = 2, kUnits = kBlocks + 3;

Decoder sharded_so(const DeviceMesh& mesh, const FullyShardOptions& options) {
  Decoder model{nullptr};
  build_seeded([&] {
    model = Decoder(6, kBlocks);
    return Model{model.ptr(), {}};
  });
  shard_decoder_with(options, *model, mesh);
  return model;
}

Data batch_of(int64_t rank, uint64_t step) { return make_data(data_seed(step, rank)); }

// A model and its optimizer.
struct TrainedRun {
  TrainedRun(const DeviceMesh& mesh, const FullyShardOptions& options)
      : rank(mesh.rank()), model(sharded_so(mesh, options)), optimizer(model->parameters(), 0.01) {}

  void backward(uint64_t data) { loss_of(model, batch_of(rank, data)).backward(); }
  // Whether outer ranks reduce; nothing where the last backward of a step does.
  void step(const std::vector<uint64_t>& micro_batches) {
    optimizer.zero_grad();
    for (const auto data : micro_batches) {
      get_fsdp_module(*model).set_requires_all_reduce(data == micro_batches.back());
      backward(data);
    }
    norm = clip_grad_norm_(model->parameters(), 0.5).item<double>();
    optimizer.step();
  }

  int64_t rank;
  Decoder model;
  torch::optim::AdamW optimizer;
  double norm = 0;
};

void expect_same_values(const TrainedRun& run, const TrainedRun& expected,
                        const std::string& what) {
  const auto parameters = run.model->named_parameters();
  const auto others = expected.model->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(full_value(parameters[i].value()), full_value(others[i])))
        << what << ", " << parameters[i].key();
  }
}

// The norm adds up other parts of the gradients, so its last bits are others, and so are
// those of clipped values.
void expect_trains_alike(const DeviceMesh& mesh, const std::string& what,
                         const FullyShardOptions& options = {}) {
  TrainedRun expected(mesh, with(Outer::kReplicate, options));
  TrainedRun run(mesh, with(Outer::kShardOptimizer, options));
  for (const std::vector<uint64_t>& micro_batches :
       std::vector<std::vector<uint64_t>>{{1}, {2, 3}, {4}}) {
    for (auto* each : {&expected, &run}) {
      each->optimizer.zero_grad();
      for (const auto data : micro_batches) {
        get_fsdp_module(*each->model).set_requires_all_reduce(data == micro_batches.back());
        each->backward(data);
      }
      each->optimizer.step();
    }
    expect_same_values(run, expected, what);
  }
}

class ShardsTheOptimizer : public ::testing::TestWithParam<Grid> {
 protected:
  const Grid& grid() const { return GetParam(); }
  int64_t ranks() const { return grid().outer * grid().inner; }
  bool has_pieces() const { return grid().outer > 1; }
  void on_ranks(const std::function<void(const DeviceMesh& mesh)>& body) const {
    run_ranks(ranks(), [&](int64_t) { body(mesh_of(grid())); });
  }
};

TEST_P(ShardsTheOptimizer, EntriesAreCutOverTheInnerAndThenTheOuterDimension) {
  on_ranks([&](const DeviceMesh& mesh) {
    const TrainedRun run(mesh, with(Outer::kShardOptimizer));
    const DTensor entry(run.model->head->parameters()[0]);
    if (!has_pieces()) {
      EXPECT_EQ(entry.device_mesh(), mesh);
      return;
    }
    EXPECT_EQ(entry.device_mesh(), (mesh[{"inner", "outer"}]));
    EXPECT_EQ(entry.placements(), (std::vector<Placement>{Shard{0}, Shard{0}}));
    const auto shard = (10 + grid().inner - 1) / grid().inner;
    EXPECT_LE(entry.to_local().size(0), (shard + grid().outer - 1) / grid().outer);
  });
}

TEST_P(ShardsTheOptimizer, HasTheBitsOfHybridSharding) {
  on_ranks([&](const DeviceMesh& mesh) {
    expect_trains_alike(mesh, "default");
    expect_trains_alike(mesh, "kept", {.reshard_after_forward = false});
    expect_trains_alike(mesh, "bfloat16",
                        {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    expect_trains_alike(mesh, "bfloat16 sums", {.mp_policy = {.param_dtype = at::kBFloat16}});
    const auto columns = [](const std::string&, const at::Tensor& tensor) {
      return std::optional<Placement>(Shard{tensor.dim() - 1});
    };
    expect_trains_alike(mesh, "columns", {.shard_placement_fn = columns});
  });
}

TEST_P(ShardsTheOptimizer, HasTheBitsOfHybridShardingOffloaded) {
  internal::set_offloads_from_cpu(true);
  on_ranks([&](const DeviceMesh& mesh) {
    expect_trains_alike(mesh, "offloaded", {.offload_policy = {.offload_to_cpu = true}});
    expect_trains_alike(
        mesh, "offloaded, bfloat16",
        {.mp_policy = {.param_dtype = at::kBFloat16}, .offload_policy = {.offload_to_cpu = true}});
  });
  internal::set_offloads_from_cpu(false);
}

TEST_P(ShardsTheOptimizer, ClipsByTheNormOfTheWholeGradients) {
  on_ranks([&](const DeviceMesh& mesh) {
    TrainedRun expected(mesh, with(Outer::kReplicate)), run(mesh, with(Outer::kShardOptimizer));
    for (auto* each : {&expected, &run}) each->step({1, 2});
    EXPECT_NEAR(run.norm, expected.norm, 1e-6);
    const auto others = expected.model->parameters();
    for (size_t i = 0; i < others.size(); ++i) {
      EXPECT_TRUE(torch::allclose(full_value(run.model->parameters()[i]), full_value(others[i]),
                                  1e-5, 1e-7));
    }
  });
}

// Its local parts are those of the entries.
TEST_P(ShardsTheOptimizer, HoldsGradientsAndStateOfItsPiecesOnly) {
  on_ranks([&](const DeviceMesh& mesh) {
    TrainedRun run(mesh, with(Outer::kShardOptimizer));
    run.step({1});
    for (const auto& entry : run.model->parameters()) {
      const auto part = DTensor(entry).to_local().sizes().vec();
      EXPECT_EQ(DTensor(entry.grad()).to_local().sizes().vec(), part);
      const auto& state = dynamic_cast<torch::optim::AdamWParamState&>(
          *run.optimizer.state().at(entry.unsafeGetTensorImpl()));
      EXPECT_EQ(DTensor(state.exp_avg()).to_local().sizes().vec(), part);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Grids, ShardsTheOptimizer,
                         ::testing::Values(Grid{2, 1}, Grid{1, 2}, Grid{2, 2}, Grid{3, 1},
                                           Grid{2, 3}, Grid{3, 2}),
                         [](const auto& info) { return name_of(info.param); });

// 2 x 2 ranks, whose bytes can be told in the head: rows of 64 bytes, which need no
// padding.
class InnerShardsOfFour : public ::testing::Test {
 protected:
  static constexpr int64_t kWidth = 16, kRows = 32;
  static constexpr int64_t kBytes = kWidth * kRows * 4;
  struct Layers {
    Layers(const DeviceMesh& mesh, const FullyShardOptions& options)
        : mesh(mesh), layers(layer(), layer_back()) {
      set_start_values(*layers);
      for (const auto& each : *layers) fully_shard(each.ptr(), mesh, options);
      fully_shard(layers, mesh, options);
      optimizer = std::make_unique<torch::optim::SGD>(layers->parameters(), 0.1);
    }
    static torch::nn::Linear layer() {
      return torch::nn::Linear(torch::nn::LinearOptions(kWidth, kRows).bias(false));
    }
    static torch::nn::Linear layer_back() {
      return torch::nn::Linear(torch::nn::LinearOptions(kRows, kWidth).bias(false));
    }
    torch::Tensor forward() { return layers->forward(torch::ones({2, kWidth})); }
    void train() {
      forward().sum().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    DeviceMesh mesh;
    torch::nn::Sequential layers;
    std::unique_ptr<torch::optim::SGD> optimizer;
  };
  static void on_four(const std::function<void(const DeviceMesh&)>& body) {
    run_ranks(4, [&](int64_t) { body(mesh_of({2, 2})); });
  }
};

Counters difference(const Counters& after, const Counters& before) {
  Counters difference;
  for (auto counter : {&Counters::all_gathers, &Counters::all_reduces, &Counters::outer_all_gathers,
                       &Counters::outer_reduce_scatters, &Counters::all_gather_bytes,
                       &Counters::reduce_scatter_bytes, &Counters::all_reduce_bytes,
                       &Counters::outer_all_gather_bytes, &Counters::outer_reduce_scatter_bytes})
    difference.*counter = after.*counter - before.*counter;
  return difference;
}

// The flags that travel with gradients: one of each parameter and one more, in 64 bytes.
constexpr int64_t kFlags = 64;

TEST_F(InnerShardsOfFour, TravelOverTheOuterDimensionOnceAStep) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer, {.reshard_after_forward = true}));
    layers.train();
    const auto before = counters(mesh);
    layers.train();
    const auto step = difference(counters(mesh), before);
    EXPECT_EQ(step.outer_all_gathers, 2);
    EXPECT_EQ(step.outer_reduce_scatters, 2);
    EXPECT_EQ(step.all_reduces, 0);
    EXPECT_EQ(step.all_gathers, 2);  // backward begins with the last unit, and needs no other
    // A quarter of each matrix from the other rank of the dimension.
    EXPECT_EQ(step.outer_all_gather_bytes, 2 * kBytes / 4);
    EXPECT_EQ(step.outer_reduce_scatter_bytes, 2 * (kBytes / 4 + kFlags));
    EXPECT_EQ(step.all_gather_bytes, 2 * kBytes / 2);
    EXPECT_EQ(step.reduce_scatter_bytes, 2 * (kBytes / 2 + kFlags));
  });
}

TEST_F(InnerShardsOfFour, StayForAllGathersUntilTheNextStep) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer, {.reshard_after_forward = true}));
    layers.train();
    const torch::NoGradGuard no_grad;
    const auto before = counters(mesh);
    for (int time = 0; time < 3; ++time) layers.forward();
    const auto evaluated = difference(counters(mesh), before);
    EXPECT_GE(evaluated.all_gathers, 3);
    EXPECT_EQ(evaluated.outer_all_gathers, 2);
  });
}

// Those of the embedding are used, those of the first block gathered ahead, and the next
// block's put together for that.
TEST_F(InnerShardsOfFour, AreOnTheirWayAUnitBeforeTheirGather) {
  on_four([](const DeviceMesh& mesh) {
    TrainedRun run(mesh, with(Outer::kShardOptimizer));
    for (const uint64_t data : {1, 2}) run.step({data});
    const auto before = counters(mesh);
    run.model->embedding->forward(batch_of(mesh.rank(), 3).index);
    const auto touched = difference(counters(mesh), before);
    EXPECT_EQ(touched.all_gathers, 2);
    EXPECT_EQ(touched.outer_all_gathers, 3);
  });
}

TEST_F(InnerShardsOfFour, SendAsMuchAsHybridShardingAndLessInSixteenBits) {
  on_four([](const DeviceMesh& mesh) {
    const auto outer_bytes = [&](Outer outer, const MixedPrecisionPolicy& precision) {
      Layers layers(mesh, with(outer, {.mp_policy = precision}));
      layers.train();
      const auto before = counters(mesh);
      layers.train();
      const auto step = difference(counters(mesh), before);
      return step.all_reduce_bytes + step.outer_all_gather_bytes + step.outer_reduce_scatter_bytes;
    };
    EXPECT_EQ(outer_bytes(Outer::kShardOptimizer, {}), outer_bytes(Outer::kReplicate, {}));
    const MixedPrecisionPolicy bfloat16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    EXPECT_EQ(
        outer_bytes(Outer::kReplicate, bfloat16) - outer_bytes(Outer::kShardOptimizer, bfloat16),
        2 * kBytes / 8);
  });
}

TEST_F(InnerShardsOfFour, AreReadByEvaluationsWithoutTheOuterDimension) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    layers.train();
    const torch::NoGradGuard no_grad;
    layers.forward();
    const auto before = counters(mesh);
    if (mesh.local_rank(0) == 1) layers.forward();  // of one outer rank alone
    EXPECT_EQ(counters(mesh).outer_all_gathers, before.outer_all_gathers);
  });
}

TEST_F(InnerShardsOfFour, AreOfHalfTheBytesInSixteenBitsAndPiecesAQuarter) {
  on_four([](const DeviceMesh& mesh) {
    const Layers layers(
        mesh, with(Outer::kShardOptimizer, {.mp_policy = {.param_dtype = at::kBFloat16}}));
    EXPECT_EQ(counters(mesh).sharded_bytes, 2 * kBytes / 4);
    EXPECT_EQ(counters(mesh).inner_shard_bytes, 2 * kBytes / 2 / 2);
  });
  on_four([](const DeviceMesh& mesh) {
    { const Layers layers(mesh, with(Outer::kShardOptimizer)); }
    const Layers held(mesh, with(Outer::kReplicate));
    EXPECT_EQ(counters(mesh).inner_shard_bytes, 0);
  });
}

// The rows of one gather at a time, and of the one ahead of it.
TEST_F(InnerShardsOfFour, LeaveNothingBehindAfterAStep) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    for (int step = 0; step < 2; ++step) layers.train();
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// A decoder of units of one size. Of a model of p bytes: p / 4 of parameters, and so of
// gradients and of each state, and p / 2 of inner shards, in place of p / 2 of
// parameters; on top what hybrid sharding has, and a unit's inner shards that come ahead.
TEST_F(InnerShardsOfFour, TakeTheMemoryThatTheTableSays) {
  on_four([](const DeviceMesh& mesh) {
    constexpr int64_t kModelWidth = 64;
    Counters held[2];
    int64_t model_bytes = 0;
    for (const auto outer : {Outer::kReplicate, Outer::kShardOptimizer}) {
      Decoder model(kModelWidth, 6);
      set_start_values(*model);
      for (auto& block : model->blocks) fully_shard(block, mesh, with(outer));
      fully_shard(model, mesh, with(outer));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        reset_peak(mesh);
        loss_of(model, batch_of(mesh.rank(), 1)).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      held[static_cast<int>(outer)] = counters(mesh);
      model_bytes = 0;
      for (const auto& entry : model->parameters()) model_bytes += 4 * entry.numel();
    }
    const auto expect_about = [](int64_t actual, int64_t expected) {
      EXPECT_NEAR(static_cast<double>(actual), static_cast<double>(expected),
                  0.03 * static_cast<double>(expected));
    };
    expect_about(held[0].sharded_bytes, model_bytes / 2);
    expect_about(held[1].sharded_bytes, model_bytes / 4);
    EXPECT_EQ(held[0].inner_shard_bytes, 0);
    expect_about(held[1].inner_shard_bytes, model_bytes / 2);
    expect_about(held[1].peak_bytes, held[0].peak_bytes);
  });
}

TEST_F(InnerShardsOfFour, TakeWhatASummonedScopeWrites) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    layers.train();
    {
      const SummonFullParams summoned(*layers.layers);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : layers.layers->parameters()) parameter.fill_(3);
    }
    for (const auto& entry : layers.layers->parameters())
      EXPECT_TRUE(torch::equal(full_value(entry), torch::full_like(full_value(entry), 3)));
    EXPECT_EQ(layers.forward()[0][0].item<double>(), 9.0 * kWidth * kRows);
  });
}

TEST_F(InnerShardsOfFour, SeeWhatIsWrittenToMembersAndEntries) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    auto first = layers.layers->ptr<torch::nn::LinearImpl>(0);
    layers.train();
    const torch::NoGradGuard no_grad;
    first->weight.fill_(2);
    EXPECT_EQ(layers.layers->parameters()[0].sum().item<double>(), 2.0 * kWidth * kRows);
    EXPECT_EQ(first->weight.sum().item<double>(), 2.0 * kWidth * kRows);
    layers.layers->parameters()[0].mul_(3);
    EXPECT_EQ(first->weight.sum().item<double>(), 6.0 * kWidth * kRows);
  });
}

TEST_F(InnerShardsOfFour, FollowTheModelIntoAnotherDtype) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    layers.train();
    const auto before = full_value(layers.layers->parameters()[0]);
    layers.layers->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    const auto x = torch::ones({2, kWidth}, torch::kDouble);
    const auto expected = x.matmul(before.to(torch::kDouble).t());
    EXPECT_TRUE(torch::equal(layers.layers->ptr<torch::nn::LinearImpl>(0)->forward(x), expected));
  });
}

TEST_F(InnerShardsOfFour, OfARankThatSkipsItsStepAreAnErrorOnEveryRank) {
  on_four([](const DeviceMesh& mesh) {
    Layers layers(mesh, with(Outer::kShardOptimizer));
    layers.train();
    layers.forward().sum().backward();
    if (mesh.rank() != 2) layers.optimizer->step();
    EXPECT_THAT(message_of([&] { layers.forward(); }),
                AllOf(HasSubstr("not all ranks wrote the shards of unit '0'"),
                      HasSubstr("0.weight"), HasSubstr("rank 2 did not")));
    const torch::NoGradGuard no_grad;
    for (auto& entry : layers.layers->parameters()) entry.fill_(1);
    EXPECT_EQ(layers.forward()[0][0].item<double>(), 1.0 * kWidth * kRows);
  });
}

TEST_F(InnerShardsOfFour, AreRefusedWhereThereIsNoOuterDimensionOrPartsMustStayWhole) {
  run_ranks(2, [](int64_t) {
    torch::nn::Linear layer(4, 4);
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  fully_shard(layer, init_device_mesh(torch::kCPU, {2}),
                              with(Outer::kShardOptimizer));
                }),
                AllOf(HasSubstr("outer is kShardOptimizer"), HasSubstr("of 1 dimensions")));
    for (const Placement& placement :
         std::vector<Placement>{Shard{.dim = 0, .unit = 2}, Owned{0}, Owned{}}) {
      const auto place = [&](const std::string&, const at::Tensor&) {
        return std::optional(placement);
      };
      EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                    fully_shard(layer, mesh_of({2, 1}),
                                with(Outer::kShardOptimizer, {.shard_placement_fn = place}));
                  }),
                  AllOf(HasSubstr("'weight'"), HasSubstr("kShardOptimizer")));
      EXPECT_FALSE(is_fsdp_module(*layer));
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
