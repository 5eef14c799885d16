// Parameters that shard_placement_fn has sharded along another dimension than the first.
#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"
#include "tests/support/write_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kSteps = 5;

FullyShardOptions all_along(int64_t dim, FullyShardOptions options = {}) {
  options.shard_placement_fn = [dim](const std::string&, const Tensor& tensor) {
    return Shard{tensor.dim() > 1 ? dim : 0};
  };
  return options;
}

// What torch.chunk gives `index`, or an empty one past its chunks.
Tensor chunk_at(const Tensor& whole, int64_t dim, int64_t parts, int64_t index) {
  const auto chunks = whole.chunk(parts, dim);
  if (index < static_cast<int64_t>(chunks.size())) return chunks[static_cast<size_t>(index)];
  return whole.narrow(dim, whole.size(dim), 0);
}

struct OneWeight : torch::nn::Module {
  explicit OneWeight(const std::vector<int64_t>& shape)
      : weight(register_parameter("weight", torch::empty(shape))) {
    set_start_values(*this);
  }
  Tensor weight;
};

// Of every kind of cut: a matrix by columns, the middle of three dimensions and the last.
struct CutNetImpl : torch::nn::Module {
  CutNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 7))),
        conv(register_module("conv", torch::nn::Conv1d(7, 4, 3))),
        wide(register_module("wide", torch::nn::Conv1d(4, 2, 3))),
        last(register_module("last", torch::nn::Linear(2, 1))) {
    to(torch::kDouble);
    set_start_values(*this);
  }
  Tensor forward(const Tensor& x) {
    const auto y = torch::tanh(conv(torch::tanh(first(x)).transpose(1, 2)));
    return last(torch::tanh(wide(y)).flatten(1));
  }
  torch::nn::Linear first;
  torch::nn::Conv1d conv, wide;
  torch::nn::Linear last;
};
TORCH_MODULE(CutNet);

Tensor loss_of(CutNet& net, int64_t rank, int64_t step) {
  const auto numbers = torch::arange(90, torch::kDouble).mul(static_cast<double>(1 + rank));
  return net(torch::sin(numbers + static_cast<double>(step)).view({3, 5, 6})).pow(2).sum();
}

// Dimension 1 of `first` and `conv`, 2 of `wide`, the last of `last`.
FullyShardOptions cut(FullyShardOptions options = {}) {
  options.shard_placement_fn = [](const std::string&,
                                  const Tensor& tensor) -> std::optional<Shard> {
    if (tensor.dim() == 1) return std::nullopt;
    return Shard{tensor.dim() == 3 && tensor.size(0) == 4 ? 1 : -1};
  };
  return options;
}

CutNet shard_net(const DeviceMesh& mesh, const FullyShardOptions& options) {
  CutNet net;
  fully_shard(net->first, mesh, options);
  fully_shard(net->conv, mesh, options);
  fully_shard(net, mesh, options);
  return net;
}

// Beyond two ranks a sum may be in another order.
void expect_same(const Tensor& actual, const Tensor& expected, int64_t ranks,
                 const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  const double tolerance = ranks <= 2 ? 0 : 1e-12;
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance))
      << what << " differs by " << (actual - expected).abs().max();
}

// Adds the mean over the ranks' data to the gradients.
void backward_of_all(CutNet& plain, int64_t ranks, const std::vector<int64_t>& steps) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Tensor loss = loss_of(plain, rank, steps.front());
    for (size_t i = 1; i < steps.size(); ++i) loss = loss + loss_of(plain, rank, steps[i]);
    loss.backward();
  }
  for (auto& parameter : plain->parameters()) parameter.mutable_grad().div_(ranks);
}

void expect_trains_as_unsharded(const DeviceMesh& mesh, int64_t rank,
                                const FullyShardOptions& options) {
  const auto ranks = mesh.size();
  CutNet plain, net = shard_net(mesh, cut(options));
  const auto adamw = torch::optim::AdamWOptions(0.01).eps(1e-3);  // what is rounded stays small
  torch::optim::AdamW reference(plain->parameters(), adamw), optimizer(net->parameters(), adamw);
  for (int64_t step = 0; step < kSteps; ++step) {
    reference.zero_grad();
    optimizer.zero_grad();
    backward_of_all(plain, ranks, {step});
    loss_of(net, rank, step).backward();
    const auto entries = net->named_parameters();
    for (size_t i = 0; i < entries.size(); ++i) {
      const auto label = entries[i].key() + " in step " + std::to_string(step);
      EXPECT_EQ(DTensor(entries[i].value().grad()).placements(),
                DTensor(entries[i].value()).placements());
      expect_same(full_gradient(entries[i].value()), plain->parameters()[i].grad(), ranks, label);
    }
    reference.step();
    optimizer.step();
    for (size_t i = 0; i < entries.size(); ++i)
      expect_same(full_value(entries[i].value()), plain->parameters()[i].detach(), ranks,
                  entries[i].key());
  }
}

class ShardPlacement : public Worlds {};

TEST_P(ShardPlacement, GivesEveryRankItsContiguousChunkOfTheDimension) {
  const std::vector<std::pair<std::vector<int64_t>, int64_t>> cases = {
      {{6, 8}, 0},       {{6, 8}, 1},       {{6, 8}, -1},   {{6, 8}, -2},       {{5, 7}, 1},
      {{3, 2}, 1},       {{4, 1}, 1},       {{1, 9}, 1},    {{4, 6}, 1},        {{4, 3, 5, 2}, 1},
      {{4, 3, 5, 2}, 2}, {{4, 3, 5, 2}, 3}, {{2, 3}, -1},   {{4, 3, 5, 2}, -2}, {{2, 1, 3, 3}, -1},
      {{3, 0}, 1},       {{0, 4}, 1},       {{2, 4, 0}, 1}, {{8, 4, 3, 3}, 1},  {{7}, -1}};
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    for (const auto& [shape, dim] : cases) {
      const auto model = std::make_shared<OneWeight>(shape);
      const auto whole = model->weight.detach().clone();
      fully_shard(model, mesh, {.shard_placement_fn = [dim = dim](const auto&, const auto&) {
                    return Shard{dim};
                  }});
      const DTensor entry(model->parameters()[0]);
      const auto from_start = dim < 0 ? dim + whole.dim() : dim;
      EXPECT_EQ(entry.placements(), std::vector<Placement>{Shard{from_start}});
      const auto local = entry.to_local();
      EXPECT_TRUE(local.is_contiguous());
      EXPECT_TRUE(torch::equal(local, chunk_at(whole, from_start, world(), rank)))
          << whole.sizes() << " along " << dim;
      EXPECT_TRUE(torch::equal(full_value(entry), whole)) << whole.sizes() << " along " << dim;
      EXPECT_TRUE(torch::equal(model->weight * 1, whole)) << whole.sizes() << " along " << dim;
    }
  });
}

TEST_P(ShardPlacement, OfADimensionThatIsNotThereIsRefusedByName) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    for (const int64_t dim : {2, -3}) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { fully_shard(layer, mesh, all_along(dim)); }),
                  AllOf(HasSubstr("Shard(" + std::to_string(dim) + ")"), HasSubstr("'weight'"),
                        HasSubstr("2 dimensions"), HasSubstr("rank " + std::to_string(rank))));
      EXPECT_FALSE(is_fsdp_module(*layer));
    }
  });
}

TEST_P(ShardPlacement, IsAskedOncePerParameterByFullyShardAndByAutoShard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    std::map<std::string, int> asked;
    const FullyShardOptions options{
        .shard_placement_fn = [&asked](const std::string& name, const Tensor& tensor) {
          ++asked[name + (tensor.dim() > 1 ? " of " + std::to_string(tensor.size(1)) : "")];
          return Shard{tensor.dim() - 1};
        }};
    auto layer = make_linear(4, 5);
    fully_shard(layer, mesh, options);
    EXPECT_EQ(asked, (std::map<std::string, int>{{"weight of 4", 1}, {"bias", 1}}));
    asked.clear();
    CutNet net;
    auto_shard(net, by_type<torch::nn::Conv1d>(), mesh, options);
    EXPECT_EQ(asked, (std::map<std::string, int>{{"weight of 7", 1},
                                                 {"weight of 4", 1},
                                                 {"bias", 2},
                                                 {"first.weight of 6", 1},
                                                 {"first.bias", 1},
                                                 {"last.weight of 2", 1},
                                                 {"last.bias", 1}}));
    EXPECT_EQ(DTensor(net->conv->parameters()[0]).placements().back(), Placement(Shard{2}));
    EXPECT_EQ(DTensor(net->first->parameters()[0]).placements().back(), Placement(Shard{1}));
  });
}

TEST_P(ShardPlacement, TrainsAsTheUnshardedModel) {
  on_ranks(
      [](int64_t rank, const DeviceMesh& mesh) { expect_trains_as_unsharded(mesh, rank, {}); });
}

TEST_P(ShardPlacement, KeptAfterForwardTrainsAsTheUnshardedModel) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    expect_trains_as_unsharded(mesh, rank, {.reshard_after_forward = false});
  });
}

TEST_P(ShardPlacement, GradientsWithoutSynchronisationJoinTheNextStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    CutNet plain, net = shard_net(mesh, cut());
    {
      const NoSyncGuard guard(get_fsdp_module(*net));
      loss_of(net, rank, 1).backward();
    }
    loss_of(net, rank, 2).backward();
    backward_of_all(plain, world(), {1, 2});
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::allclose(full_gradient(net->parameters()[i]),
                                  plain->parameters()[i].grad(), 1e-12, 1e-12))
          << "parameter " << i;
    }
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// In each dtype a gradient is rounded before it is added, and what is added is the same.
TEST_P(ShardPlacement, InMixedPrecisionTrainsAsAlongDimensionZero) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (const auto reduce_dtype : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
      const FullyShardOptions options{
          .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype}};
      CutNet usual = shard_net(mesh, options), net = shard_net(mesh, cut(options));
      torch::optim::AdamW reference(usual->parameters(), 0.01), optimizer(net->parameters(), 0.01);
      for (int64_t step = 0; step < kSteps; ++step) {
        reference.zero_grad();
        optimizer.zero_grad();
        loss_of(usual, rank, step).backward();
        loss_of(net, rank, step).backward();
        reference.step();
        optimizer.step();
      }
      for (size_t i = 0; i < usual->parameters().size(); ++i) {
        expect_same(full_value(net->parameters()[i]), full_value(usual->parameters()[i]), world(),
                    "parameter " + std::to_string(i));
      }
    }
  });
}

TEST_P(ShardPlacement, WritesToMembersReachTheShards) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    for (const auto& policy :
         {MixedPrecisionPolicy{}, MixedPrecisionPolicy{.param_dtype = at::kFloat}}) {
      CutNet plain, net = shard_net(mesh, cut({.mp_policy = policy}));
      for (auto* each : {&plain, &net}) {
        (*each)->first->weight.fill_(0.5);
        (*each)->first->weight.select(1, 5).fill_(3);
        (*each)->conv->weight.fill_(0.25);
        (*each)->conv->weight.select(1, 0).fill_(2);
      }
      const auto of = [rank, this](const Tensor& whole) {
        return chunk_at(whole, 1, world(), rank);
      };
      const DTensor first(net->first->parameters()[0]), conv(net->conv->parameters()[0]);
      EXPECT_TRUE(torch::equal(first.to_local(), of(plain->first->weight)));
      EXPECT_TRUE(torch::equal(conv.to_local(), of(plain->conv->weight)));
      get_fsdp_module(*net->conv).reshard();
      EXPECT_TRUE(torch::equal(net->conv->weight.to(at::kDouble), plain->conv->weight));
    }
  });
}

TEST_P(ShardPlacement, WritesToRegistryEntriesReachTheMembers) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    CutNet plain, net = shard_net(mesh, cut());
    EXPECT_TRUE(torch::equal(net->conv->weight * 2, plain->conv->weight * 2));
    net->conv->parameters()[0].copy_(plain->conv->weight * 3);
    EXPECT_TRUE(torch::equal(net->conv->weight * 2, plain->conv->weight * 6));
  });
}

TEST_P(ShardPlacement, SummonedParametersAreWholeAndWhatIsWrittenToThemStays) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    CutNet plain, net = shard_net(mesh, cut());
    loss_of(net, rank, 1).backward();
    backward_of_all(plain, world(), {1});
    {
      const torch::NoGradGuard no_grad;
      const SummonFullParams full(net, {.with_grads = true});
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        auto parameter = net->parameters()[i];
        EXPECT_TRUE(torch::equal(parameter, plain->parameters()[i]));
        expect_same(parameter.grad(), plain->parameters()[i].grad(), world(), "gradient");
        parameter.mul_(3);
        parameter.mutable_grad().mul_(2);
      }
    }
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      const auto expected = plain->parameters()[i];
      EXPECT_TRUE(torch::equal(full_value(net->parameters()[i]), expected.detach() * 3));
      expect_same(full_gradient(net->parameters()[i]), expected.grad() * 2, world(), "gradient");
    }
  });
}

TEST_P(ShardPlacement, ClippingHasTheNormOfTheUnshardedModel) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    CutNet plain, net = shard_net(mesh, cut());
    loss_of(net, rank, 1).backward();
    backward_of_all(plain, world(), {1});
    const auto expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
    EXPECT_NEAR(clip_grad_norm_(net->parameters(), 0.01).item<double>(), expected, 1e-9 * expected);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::allclose(full_gradient(net->parameters()[i]),
                                  plain->parameters()[i].grad(), 1e-5, 1e-12));
    }
  });
}

TEST_P(ShardPlacement, ChangesTheDtypeInPlace) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    CutNet plain, net = shard_net(mesh, cut());
    plain->to(torch::kFloat);
    net->to(torch::kFloat);
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(full_value(net->parameters()[i]), plain->parameters()[i].detach()));
    const DTensor weight(net->first->parameters()[0]);
    EXPECT_TRUE(torch::equal(weight.to_local().detach(),
                             chunk_at(plain->first->weight.detach(), 1, world(), rank)));
  });
}

TEST_P(ShardPlacement, LoadsWhatAPlainModelSaved) {
  std::stringstream file;
  {
    CutNet plain;
    const torch::NoGradGuard no_grad;
    plain->conv->weight.mul_(7);
    torch::save(plain, file);
  }
  const auto bytes = file.str();
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    CutNet plain, net = shard_net(mesh, cut());
    std::stringstream mine(bytes);
    torch::load(net, mine);
    EXPECT_TRUE(
        torch::equal(full_value(net->conv->parameters()[0]), plain->conv->weight.detach() * 7));
  });
}

TEST_P(ShardPlacement, OfADeferredModelHasTheValuesOfOneBuiltAtOnce) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto plain = make_linear(6, 5);
    auto layer = deferred_init([] { return make_linear(6, 5); });
    fully_shard(layer, mesh, all_along(1));
    const auto own = chunk_at(plain->weight.detach(), 1, world(), rank);
    materialize(*layer);
    EXPECT_TRUE(torch::equal(DTensor(layer->parameters()[0]).to_local().detach(), own));
    EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]), plain->weight.detach()));
  });
}

// A square matrix takes the same row whichever way it is cut.
TEST_P(ShardPlacement, SendsAsMuchAsAlongDimensionZero) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto sent_along = [&](int64_t dim) {
      auto model = sharded(Pair(8, 8, 8), mesh, all_along(dim));
      const auto before = counters(mesh);
      const auto traffic = traffic_of(mesh, [&] {
        for (int step = 0; step < 2; ++step)
          model(torch::full({2, 8}, 1.0 + static_cast<double>(rank))).sum().backward();
      });
      const auto after = counters(mesh);
      return std::vector<int64_t>{
          traffic.all_gathers,     traffic.prefetched,
          traffic.reduce_scatters, traffic.all_gather_bytes,
          after.sharded_bytes,     after.reduce_scatter_bytes - before.reduce_scatter_bytes};
    };
    EXPECT_EQ(sent_along(1), sent_along(0));
  });
}

INSTANTIATE_WORLDS(ShardPlacement, 1, 2, 3, 4);

TEST(ShardPlacements, OverReplicasTrainAsTheUnshardedModel) {
  const std::vector<std::vector<int64_t>> shapes = {{2, 2}, {2, 1}, {1, 3}};
  for (const auto& shape : shapes) {
    run_ranks(shape[0] * shape[1], [&](int64_t rank) {
      const auto mesh = init_device_mesh(torch::kCPU, shape, {"replicate", "shard"});
      const auto net = shard_net(mesh, cut());
      const DTensor entry(net->conv->parameters()[0]);
      EXPECT_EQ(entry.placements(), (std::vector<Placement>{Replicate{}, Shard{1}}));
      expect_trains_as_unsharded(mesh, rank, {});
    });
  }
}

TEST(ShardPlacements, InHalvesOfAWorldTrainAsTheUnshardedModel) {
  on_ranks_of(4, [](int64_t rank, const DeviceMesh& mesh) {
    expect_trains_as_unsharded(mesh, rank,
                               {.reshard_after_forward = ReshardAfterForward::to_world(2)});
  });
}

TEST(ShardPlacements, ShardSumsThatWaitForTheReplicasJoinTheNextStep) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    CutNet plain, net = shard_net(mesh, cut());
    auto root = get_fsdp_module(*net);
    root.set_requires_all_reduce(false);
    loss_of(net, rank, 1).backward();
    root.set_requires_all_reduce(true);
    loss_of(net, rank, 2).backward();
    backward_of_all(plain, 4, {1, 2});
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      expect_same(full_gradient(net->parameters()[i]), plain->parameters()[i].grad(), 4, "sum");
  });
}

// The shapes are the same, and so are the sizes of the rows.
TEST(ShardPlacements, ThatDifferBetweenRanksAreAnErrorOnEveryRankAtTheFirstGather) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh, all_along(rank));
    EXPECT_THAT(message_of([&] {
                  layer(torch::ones({1, 4}));
                }),
                AllOf(HasSubstr("'weight'"), HasSubstr("sharded dimension")));
  });
}

TEST(ShardPlacements, ARawWriteIsReportedWhereTheWrittenColumnIs) {
  const WriteChecks checks;
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto layer = make_linear(4, 3);
    auto unit = fully_shard(layer, mesh, all_along(1));
    unit.unshard();
    layer->weight.data_ptr<float>()[4 + 3] = 42;  // in the last column, which is rank 1's
    const auto told = message_of([&] { unit.reshard(); });
    EXPECT_THAT(told, HasSubstr(rank == 1 ? "'weight'" : "nothing was thrown"));
  });
}

}  // namespace
}  // namespace fsdp::testing
