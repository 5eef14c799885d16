// Meshes of two dimensions: the first replicates, the second shards. Gradients are
// reduced over the shards, then over the replicas.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"

#include <atomic>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kDepth = 3, kUnitsOfDepth = kDepth + 3;

struct Shape {
  int64_t replicas, shards;
};

class HybridSharding : public ::testing::TestWithParam<Shape> {
 protected:
  int64_t ranks() const { return GetParam().replicas * GetParam().shards; }
  bool has_replicas() const { return GetParam().replicas > 1; }
  void on_ranks(
      const std::function<void(int64_t rank, const DeviceMesh& mesh, const Model&)>& body) const {
    run_ranks(ranks(), [&](int64_t rank) {
      const auto mesh = init_device_mesh(torch::kCPU, {GetParam().replicas, GetParam().shards},
                                         {"replicate", "shard"});
      const auto model = build_seeded([] { return decoder_model(6, kDepth); });
      shard_decoder(*model.module, mesh);
      body(rank, mesh, model);
    });
  }
  ExpectedGradients expected(uint64_t step) const {
    return expected_gradients(build_seeded([] { return decoder_model(6, kDepth); }), ranks(), step);
  }
};

Data data_of(int64_t rank, uint64_t step) { return make_data(data_seed(step, rank)); }

void expect_sum_of(const torch::nn::Module& module, const ExpectedGradients& a,
                   const ExpectedGradients& b) {
  const auto parameters = module.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(full_gradient(parameters[i]), a.mean[i] + b.mean[i], 1e-5, 1e-7))
        << "parameter " << i;
  }
}

TEST_P(HybridSharding, EntriesAreReplicatedAndShardedInThatOrder) {
  on_ranks([&](int64_t, const DeviceMesh& mesh, const Model& model) {
    const DTensor entry(model.module->parameters()[0]);
    EXPECT_EQ(entry.device_mesh(), mesh);
    EXPECT_EQ(entry.placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
    const auto rows = entry.to_local().size(0);
    EXPECT_LE(rows, (10 + GetParam().shards - 1) / GetParam().shards);
  });
}

TEST_P(HybridSharding, HasTheUnshardedGradientsOverSeveralSteps) {
  on_ranks([&](int64_t rank, const DeviceMesh&, const Model& model) {
    for (const uint64_t step : {1, 2}) {
      model.module->zero_grad();
      model.loss(data_of(rank, step)).backward();
      expect_gradients(*model.module, expected(step), ranks(), "hybrid");
    }
  });
}

TEST_P(HybridSharding, SendsOneAllReducePerUnitAndStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    model.loss(data_of(rank, 1)).backward();
    const auto sent = traffic_of(mesh, [&] { model.loss(data_of(rank, 1)).backward(); });
    EXPECT_EQ(sent.reduce_scatters, kUnitsOfDepth);
    EXPECT_EQ(sent.all_reduces, has_replicas() ? kUnitsOfDepth : 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// Where every replica has all, nothing comes from other ranks but what is all-reduced.
TEST_P(HybridSharding, OneShardPerReplicaIsGatheredFromNoOtherRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    const bool has_shards = GetParam().shards > 1;
    model.loss(data_of(rank, 1)).backward();
    EXPECT_EQ(counters(mesh).all_gather_bytes > 0, has_shards);
    EXPECT_EQ(counters(mesh).reduce_scatter_bytes > 0, has_shards);
    EXPECT_EQ(counters(mesh).all_reduces, has_replicas() ? kUnitsOfDepth : 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    const auto entry = DTensor(dynamic_cast<DecoderImpl&>(*model.module).head->parameters()[0]);
    EXPECT_EQ(entry.to_local().numel() < entry.numel(), has_shards);
  });
}

TEST_P(HybridSharding, WithoutAllReduceKeepsShardSumsThatTheNextOneTakesAlong) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    auto root = get_fsdp_module(*model.module);
    root.set_requires_all_reduce(false);
    const auto kept = traffic_of(mesh, [&] { model.loss(data_of(rank, 1)).backward(); });
    EXPECT_EQ(kept.reduce_scatters, kUnitsOfDepth);
    EXPECT_EQ(kept.all_reduces, 0);
    EXPECT_EQ(model.module->parameters()[0].grad().defined(), !has_replicas());
    EXPECT_EQ(counters(mesh).gradient_bytes > 0, has_replicas());

    root.set_requires_all_reduce(true);
    const auto shared = traffic_of(mesh, [&] { model.loss(data_of(rank, 2)).backward(); });
    EXPECT_EQ(shared.all_reduces, has_replicas() ? kUnitsOfDepth : 0);
    expect_sum_of(*model.module, expected(1), expected(2));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(HybridSharding, ShardSumsOfUnitsThatTheNextBackwardDoesNotMeetAreSharedToo) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    auto root = get_fsdp_module(*model.module);
    root.set_requires_all_reduce(false);
    model.loss(data_of(rank, 1)).backward();
    root.set_requires_all_reduce(true);
    auto& decoder = dynamic_cast<DecoderImpl&>(*model.module);
    decoder.head(torch::zeros({1, 6})).sum().backward();  // meets the head only
    const auto whole = expected(1);
    EXPECT_TRUE(
        torch::allclose(full_gradient(model.module->parameters()[0]), whole.mean[0], 1e-5, 1e-7));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(HybridSharding, ShardSumsOfAParameterFrozenMeanwhileAreShared) {
  on_ranks([&](int64_t rank, const DeviceMesh&, const Model& model) {
    auto root = get_fsdp_module(*model.module);
    auto& decoder = dynamic_cast<DecoderImpl&>(*model.module);
    root.set_requires_all_reduce(false);
    model.loss(data_of(rank, 1)).backward();
    root.set_requires_all_reduce(true);
    auto frozen = decoder.head->named_parameters()["weight"];
    frozen.set_requires_grad(false);
    model.loss(data_of(rank, 2)).backward();
    const auto whole = expected(1);
    const auto names = model.module->named_parameters();
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i].key() != "head.weight") continue;
      EXPECT_TRUE(torch::allclose(full_gradient(frozen), whole.mean[i], 1e-5, 1e-7));
    }
  });
}

TEST_P(HybridSharding, ShardSumsAreDroppedByZeroPendingGradients) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    auto root = get_fsdp_module(*model.module);
    root.set_requires_all_reduce(false);
    model.loss(data_of(rank, 1)).backward();
    root.zero_pending_gradients();
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    root.set_requires_all_reduce(true);
    model.module->zero_grad();
    model.loss(data_of(rank, 2)).backward();
    expect_gradients(*model.module, expected(2), ranks(), "after dropping");
  });
}

TEST_P(HybridSharding, GradientsWithoutSynchronisationJoinTheNextSynchronisedStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh, const Model& model) {
    {
      NoSyncGuard guard(get_fsdp_module(*model.module));
      const auto sent = traffic_of(mesh, [&] { model.loss(data_of(rank, 1)).backward(); });
      EXPECT_EQ(sent.reduce_scatters + sent.all_reduces, 0);
    }
    model.loss(data_of(rank, 2)).backward();
    expect_sum_of(*model.module, expected(1), expected(2));
  });
}

TEST_P(HybridSharding, AParameterThatOneRankUsesHasItsGradientOnAll) {
  run_ranks(ranks(), [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {GetParam().replicas, GetParam().shards});
    auto layers = torch::nn::Sequential(make_linear(6, 4), make_linear(6, 4));
    auto first = layers->ptr<torch::nn::LinearImpl>(0),
         second = layers->ptr<torch::nn::LinearImpl>(1);
    fully_shard(layers, mesh);
    auto loss = first->forward(torch::ones({2, 6})).sum();
    if (rank == ranks() - 1) loss = loss + second->forward(torch::ones({2, 6})).sum();
    loss.backward();
    const auto mean = 2.0 / static_cast<double>(ranks());
    EXPECT_TRUE(torch::allclose(full_gradient(second->parameters()[1]), torch::full({4}, mean)));
    EXPECT_TRUE(torch::allclose(full_gradient(first->parameters()[1]), torch::full({4}, 2.0)));
  });
}

TEST_P(HybridSharding, TheNormIsThatOfTheWholeGradients) {
  on_ranks([&](int64_t rank, const DeviceMesh&, const Model& model) {
    model.loss(data_of(rank, 1)).backward();
    std::vector<torch::Tensor> flat;
    for (const auto& mean : expected(1).mean) flat.push_back(mean.flatten());
    EXPECT_NEAR(clip_grad_norm_(model.module->parameters(), 0.5).item<double>(),
                torch::cat(flat).norm().item<double>(), 1e-5);
  });
}

TEST_P(HybridSharding, StagingDoesNotGrowWithDepth) {
  const auto peak = [&](int64_t blocks) {
    std::atomic<int64_t> bytes{0};
    run_ranks(ranks(), [&](int64_t rank) {
      const auto mesh =
          init_device_mesh(torch::kCPU, {GetParam().replicas, GetParam().shards}, {"r", "s"});
      const auto model = build_seeded([=] { return decoder_model(6, blocks); });
      shard_decoder(*model.module, mesh);
      for (int step = 0; step < 2; ++step) {
        reset_peak(mesh);
        model.loss(data_of(rank, 1)).backward();
      }
      if (rank == 0) bytes = counters(mesh).peak_bytes;
    });
    return bytes.load();
  };
  EXPECT_EQ(peak(4), peak(12));
}

INSTANTIATE_TEST_SUITE_P(Shapes, HybridSharding,
                         ::testing::Values(Shape{2, 1}, Shape{1, 2}, Shape{2, 2}, Shape{3, 1},
                                           Shape{2, 3}, Shape{3, 2}),
                         [](const auto& info) {
                           return std::to_string(info.param.replicas) + "x" +
                                  std::to_string(info.param.shards);
                         });

// A decoder on a 2x2 mesh whose start values `change` has changed on some rank.
void on_changed_replicas(const std::function<void(int64_t rank, Decoder& model)>& change,
                         const std::function<void(const DeviceMesh& mesh, Decoder& model)>& body) {
  run_ranks(4, [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    Decoder model{nullptr};
    build_seeded([&] {
      model = Decoder(6, 1);
      return Model{model.ptr(), {}};
    });
    {
      torch::NoGradGuard no_grad;
      change(rank, model);
    }
    shard_decoder(*model, mesh);
    body(mesh, model);
  });
}

TEST(HybridReplicas, ThatStartDifferentAreNamedAtTheFirstGather) {
  on_changed_replicas(
      [](int64_t rank, Decoder& model) {
        if (rank >= 2) model->blocks[0]->up->weight.add_(1);
      },
      [](const DeviceMesh&, Decoder& model) {
        EXPECT_THAT(message_of([&] { loss_of(model, make_data(3)); }),
                    AllOf(HasSubstr("block0.up.weight"), HasSubstr("replica 1"),
                          HasSubstr("started with other values")));
      });
}

// All learn of it, not only the ranks that shard with the one that differs.
TEST(HybridReplicas, OfWhichOneRankStartsDifferentAreAnErrorOnEveryRank) {
  on_changed_replicas(
      [](int64_t rank, Decoder& model) {
        if (rank == 1) model->blocks[0]->up->weight.add_(1);
      },
      [](const DeviceMesh& mesh, Decoder& model) {
        const auto message = message_of([&] { loss_of(model, make_data(3)); });
        EXPECT_THAT(message, HasSubstr("block0"));
        EXPECT_THAT(message, HasSubstr(mesh.local_rank(0) == 0 ? "started with other values"
                                                               : "ranks of replica 0"));
      });
}

TEST(HybridReplicas, ThatWriteOtherValuesToAMemberAreNamed) {
  on_changed_replicas([](int64_t, Decoder&) {},
                      [](const DeviceMesh& mesh, Decoder& model) {
                        loss_of(model, make_data(3)).backward();
                        {
                          torch::NoGradGuard no_grad;
                          model->head->bias.fill_(static_cast<double>(mesh.local_rank(0)));
                        }
                        EXPECT_THAT(message_of([&] { loss_of(model, make_data(3)); }),
                                    AllOf(HasSubstr("head.bias"), HasSubstr("replica 1")));
                      });
}

TEST(HybridReplicas, AreTakenByNameAndAMeshOfThreeDimensionsIsRefused) {
  run_ranks(4, [](int64_t) {
    torch::nn::Linear layer(4, 4);
    const auto mesh = init_device_mesh(torch::kCPU, {1, 2, 2}, {"a", "b", "c"});
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { fully_shard(layer, mesh); }),
                AllOf(HasSubstr("3 dimensions"), HasSubstr("slice")));
    EXPECT_FALSE(is_fsdp_module(*layer));
    fully_shard(layer, mesh[std::vector<std::string>{"b", "c"}]);
    EXPECT_TRUE(is_fsdp_module(*layer));
  });
}

}  // namespace
}  // namespace fsdp::testing
