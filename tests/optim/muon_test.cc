// Steps of Muon on parameters that lie in all ways have the bits of the step on the plain
// parameter; what that one does is compared with Python's in tests/parity.
#include "optim/muon.h"

#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "optim/internal/orthogonalize.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using ::testing::AllOf;
using testing::expect_error;
using testing::full_value;
using ::testing::HasSubstr;
using testing::on_ranks_of;
using testing::run_ranks;
using testing::values_of;

constexpr int64_t kSteps = 3;

// After three steps, each with gradients of its own.
template <class Place>
std::vector<torch::Tensor> stepped(const std::vector<std::vector<int64_t>>& shapes,
                                   const MuonOptions& options, const Place& place,
                                   MuonCounters* counters = nullptr) {
  std::vector<torch::Tensor> params;
  for (size_t i = 0; i < shapes.size(); ++i)
    params.push_back(place(values_of(shapes[i], static_cast<double>(i)), i).requires_grad_(true));
  Muon muon(params, options);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < shapes.size(); ++i)
      params[i].mutable_grad() =
          place(values_of(shapes[i], 100.0 + static_cast<double>(i) + 10.0 * step), i);
    muon.step();
  }
  if (counters != nullptr) *counters = muon.counters();
  return params;
}

torch::Tensor as_it_is(const torch::Tensor& tensor, size_t) { return tensor; }

void expect_bits(const std::vector<torch::Tensor>& params,
                 const std::vector<torch::Tensor>& expected, const std::string& what) {
  for (size_t i = 0; i < params.size(); ++i)
    EXPECT_TRUE(torch::equal(full_value(params[i].detach()), expected[i].detach()))
        << what << ", tensor " << i;
}

const std::vector<std::vector<int64_t>> kShapes = {{8, 8},  {5, 7}, {1, 6}, {6, 1}, {12, 3},
                                                   {3, 12}, {6, 6}, {2, 9}, {0, 4}};

std::vector<MuonOptions> all_options() {
  return {MuonOptions(2e-2), MuonOptions(2e-2).nesterov(false),
          MuonOptions(1e-2).adjust_lr(AdjustLr::kMatchRmsAdamW).weight_decay(0.01).momentum(0.8),
          MuonOptions(1e-2).ns_steps(2).eps(1e-3).ns_coefficients({2, -1.5, 0.5})};
}

TEST(Muon, HasTheBitsOfThePlainStepHoweverOneMeshDimensionCuts) {
  const std::vector<std::vector<Placement>> cuts = {
      {Shard{0}}, {Shard{1}}, {Replicate{}}, {Shard{0}, Shard{1}, Replicate{}}};
  for (const int64_t world : {1, 2, 3, 4}) {
    on_ranks_of(world, [&](int64_t, const DeviceMesh& mesh) {
      for (const auto& options : all_options()) {
        const auto expected = stepped(kShapes, options, as_it_is);
        for (size_t c = 0; c < cuts.size(); ++c) {
          const auto place = [&](const torch::Tensor& tensor, size_t i) -> torch::Tensor {
            return distribute_tensor(tensor, mesh, {cuts[c][i % cuts[c].size()]});
          };
          expect_bits(stepped(kShapes, options, place), expected, "cuts " + std::to_string(c));
        }
      }
    });
  }
}

TEST(Muon, HasTheBitsOfThePlainStepOnMeshesOfTwoDimensions) {
  const std::vector<std::vector<Placement>> cuts = {{Shard{0}, Shard{1}},
                                                    {Shard{1}, Shard{0}},
                                                    {Shard{0}, Shard{0}},
                                                    {Replicate{}, Shard{0}},
                                                    {Shard{1}, Replicate{}}};
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const auto expected = stepped(kShapes, MuonOptions(2e-2), as_it_is);
    for (size_t c = 0; c <= cuts.size(); ++c) {  // the last: each as another one
      const auto place = [&](const torch::Tensor& tensor, size_t i) -> torch::Tensor {
        return distribute_tensor(tensor, mesh, cuts[(c == cuts.size() ? i : c) % cuts.size()]);
      };
      expect_bits(stepped(kShapes, MuonOptions(2e-2), place), expected,
                  "cuts " + std::to_string(c));
    }
  });
}

// Heads that the shards cut, and heads that they do not.
TEST(Muon, OfHeadsIsThatOfEachHead) {
  for (const int64_t world : {1, 2, 3}) {
    on_ranks_of(world, [&](int64_t, const DeviceMesh& mesh) {
      for (const Shard cut : {Shard{0}, Shard{1}, Shard{.dim = 0, .unit = 4}}) {
        const auto options = MuonOptions(2e-2);
        const auto place = [&](const torch::Tensor& tensor, size_t) -> torch::Tensor {
          return distribute_tensor(tensor, mesh, {cut});
        };
        const auto whole = stepped({{12, 5}}, MuonOptions(2e-2).matrix_rows(4), place);
        std::vector<torch::Tensor> heads;
        const auto head = [](const torch::Tensor& tensor, int64_t h) {
          return tensor.narrow(0, 4 * h, 4).clone();
        };
        for (int64_t h = 0; h < 3; ++h)
          heads.push_back(stepped({{12, 5}}, options, [&](const torch::Tensor& tensor, size_t) {
            return head(tensor, h);
          })[0]);
        expect_bits(whole, {torch::cat(heads).detach()}, "heads");
      }
    });
  }
}

TEST(Muon, OfAStackOfExpertsIsThatOfEachExpert) {
  for (const int64_t world : {1, 2, 3}) {
    on_ranks_of(world, [&](int64_t, const DeviceMesh& mesh) {
      for (const int64_t dim : {0, 1, 2}) {
        const auto place = [&](const torch::Tensor& tensor, size_t) -> torch::Tensor {
          return distribute_tensor(tensor, mesh, {Shard{dim}});
        };
        MuonCounters counters;
        const auto stack =
            stepped({{5, 6, 4}}, MuonOptions(2e-2).leading_dims_are_batch(true), place, &counters);
        std::vector<torch::Tensor> experts;
        for (int64_t e = 0; e < 5; ++e)
          experts.push_back(stepped(
              {{5, 6, 4}}, MuonOptions(2e-2),
              [&](const torch::Tensor& tensor, size_t) { return tensor.select(0, e).clone(); })[0]);
        expect_bits(stack, {torch::stack(experts).detach()}, "experts");
        if (dim == 0) {
          EXPECT_EQ(counters.exchanges, 0) << "whole experts need nothing";
        }
      }
    });
  }
}

// What each rank of the world counts in a step of ten matrices.
std::vector<MuonCounters> counters_of(int64_t world) {
  const std::vector<std::vector<int64_t>> shapes(10, {16, 8});
  std::vector<MuonCounters> all(static_cast<size_t>(world));
  on_ranks_of(world, [&](int64_t rank, const DeviceMesh& mesh) {
    const auto place = [&](const torch::Tensor& tensor, size_t) -> torch::Tensor {
      return distribute_tensor(tensor, mesh, {Shard{0}});
    };
    stepped(shapes, MuonOptions(2e-2), place, &all[static_cast<size_t>(rank)]);
  });
  return all;
}

TEST(Muon, OrthogonalizesEachMatrixOnceAndSendsEachElementThereAndBack) {
  const double of_one = 8 * 8 * (2 * 16 + 8);
  for (const int64_t world : {1, 2, 4}) {
    int64_t matrices = 0, bytes = 0;
    for (const auto& counters : counters_of(world)) {
      matrices += counters.matrices;
      bytes += counters.received_bytes;
      EXPECT_LE(counters.work, of_one * static_cast<double>((10 + world - 1) / world));
      EXPECT_EQ(counters.exchanges, world == 1 ? 0 : 2);
    }
    EXPECT_EQ(matrices, 10) << "each one once in the world";
    // All but the owner's part, there and back, in bf16.
    EXPECT_EQ(bytes, 2 * 2 * 10 * 16 * 8 * (world - 1) / world);
  }
}

torch::nn::Sequential two_layers() {
  torch::nn::Sequential model(torch::nn::Linear(6, 10), torch::nn::Linear(10, 5));
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : model->parameters())
    parameter.copy_(values_of(parameter.sizes().vec(), seed += 1));
  return model;
}

// Matrices by Muon, biases by AdamW. `backward(model, step)` makes the gradients.
template <class Backward>
void train(torch::nn::Sequential& model, const Backward& backward) {
  std::vector<torch::Tensor> matrices, others;
  for (const auto& parameter : model->parameters())
    (parameter.dim() == 2 ? matrices : others).push_back(parameter);
  Muon muon(matrices, MuonOptions(2e-2));
  torch::optim::AdamW adamw(others, 1e-2);
  for (int64_t step = 0; step < kSteps; ++step) {
    backward(model, step);
    muon.step();
    adamw.step();
    model->zero_grad();
  }
}

torch::Tensor loss_of(torch::nn::Sequential& model, int64_t step, int64_t rank) {
  return model->forward(values_of({3, 6}, 50.0 + 10.0 * step + rank)).square().mean();
}

TEST(Muon, TrainsAModelOfFullyShardAsThePlainOne) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {2, 1}, {1, 2}}) {
    const auto world = c10::multiply_integers(shape);
    auto plain = two_layers();
    train(plain, [&](auto& model, int64_t step) {
      for (int64_t rank = 0; rank < world; ++rank)
        (loss_of(model, step, rank) / static_cast<double>(world)).backward();
    });
    run_ranks(world, [&](int64_t rank) {
      auto model = two_layers();
      fully_shard(model, init_device_mesh(c10::kCPU, shape));
      train(model, [&](auto& sharded, int64_t step) { loss_of(sharded, step, rank).backward(); });
      const auto expected = plain->parameters();
      const auto params = model->parameters();
      for (size_t i = 0; i < params.size(); ++i)
        EXPECT_TRUE(torch::equal(full_value(params[i]), expected[i].detach())) << "parameter " << i;
    });
  }
}

TEST(Muon, LeavesOutWhatHasNoGradient) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const torch::Tensor used = distribute_tensor(values_of({4, 4}, 1), mesh, {Shard{0}});
    const torch::Tensor unused = distribute_tensor(values_of({4, 4}, 2), mesh, {Shard{0}});
    Muon muon({used, unused}, MuonOptions(2e-2));
    used.mutable_grad() = distribute_tensor(values_of({4, 4}, 3), mesh, {Shard{0}});
    muon.step();
    EXPECT_FALSE(torch::equal(full_value(used), values_of({4, 4}, 1)));
    EXPECT_TRUE(torch::equal(full_value(unused), values_of({4, 4}, 2)));
    EXPECT_EQ(muon.state().size(), 1U);
  });
}

TEST(Muon, IsRefusedWhereRanksStepOtherMatrices) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const torch::Tensor wide = distribute_tensor(values_of({4, 6}, 1), mesh, {Shard{0}});
    const torch::Tensor tall = distribute_tensor(values_of({6, 4}, 2), mesh, {Shard{0}});
    Muon muon({wide, tall}, MuonOptions(2e-2));
    const auto& used = rank == 0 ? wide : tall;
    used.mutable_grad() = distribute_tensor(values_of(used.sizes().vec(), 3), mesh, {Shard{0}});
    expect_error<c10::Error>([&] { muon.step(); }, HasSubstr("step of Muon, bucket 0"));
  });
}

TEST(Muon, DoesNotChangeItsMomentumWhereItIsOfBf16) {
  const auto grad = values_of({6, 4}, 3).to(torch::kBFloat16);
  auto param = values_of({6, 4}, 1).to(torch::kBFloat16).requires_grad_(true);
  Muon muon({param}, MuonOptions(2e-2).nesterov(false));
  param.mutable_grad() = grad;
  muon.step();
  const auto& state = static_cast<const MuonParamState&>(*muon.state().begin()->second);
  EXPECT_TRUE(torch::equal(state.momentum_buffer(), torch::zeros_like(grad).lerp(grad, 1 - 0.95)));
}

// LibTorch's Optimizer gives groups with options of a class that it does not know its
// defaults.
TEST(Muon, StepsEachGroupByItsOwnOptions) {
  const auto own = MuonOptions(0.3).weight_decay(0).momentum(0.2);
  const MuonOptions others(7);
  const auto param = [] {
    auto tensor = values_of({4, 3}, 0).requires_grad_(true);
    tensor.mutable_grad() = values_of({4, 3}, 1);
    return tensor;
  };
  const auto group_of = [&](const torch::Tensor& tensor) {
    return torch::optim::OptimizerParamGroup({tensor}, std::make_unique<MuonOptions>(own));
  };
  const auto alone = param(), in_group = param(), added = param();
  Muon({alone}, own).step();
  Muon({group_of(in_group)}, others).step();
  Muon later({param()}, others);
  later.add_param_group(group_of(added));
  later.step();
  EXPECT_FALSE(torch::equal(alone.detach(), param().detach()));
  EXPECT_TRUE(torch::equal(in_group.detach(), alone.detach()));
  EXPECT_TRUE(torch::equal(added.detach(), alone.detach()));
}

TEST(Muon, KeepsAllOptionsWhenTheyAreSaved) {
  const auto saved = MuonOptions(0.3)
                         .weight_decay(0.4)
                         .momentum(0.2)
                         .nesterov(false)
                         .ns_coefficients({2, -1.5, 0.5})
                         .eps(1e-3)
                         .ns_steps(2)
                         .adjust_lr(AdjustLr::kMatchRmsAdamW)
                         .matrix_rows(4)
                         .leading_dims_are_batch(true);
  std::stringstream bytes;
  torch::serialize::OutputArchive out;
  saved.serialize(out);
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  MuonOptions loaded(1);
  loaded.serialize(in);
  EXPECT_EQ(loaded.lr(), saved.lr());
  EXPECT_EQ(loaded.weight_decay(), saved.weight_decay());
  EXPECT_EQ(loaded.momentum(), saved.momentum());
  EXPECT_EQ(loaded.nesterov(), saved.nesterov());
  EXPECT_EQ(loaded.ns_coefficients(), saved.ns_coefficients());
  EXPECT_EQ(loaded.eps(), saved.eps());
  EXPECT_EQ(loaded.ns_steps(), saved.ns_steps());
  EXPECT_EQ(loaded.adjust_lr(), saved.adjust_lr());
  EXPECT_EQ(loaded.matrix_rows(), saved.matrix_rows());
  EXPECT_EQ(loaded.leading_dims_are_batch(), saved.leading_dims_are_batch());
  EXPECT_TRUE(loaded == saved);
}

TEST(Muon, RefusesWhatIsNoMatrixAndOptionsOutOfRange) {
  const auto matrix = torch::ones({4, 4});
  expect_error<c10::ValueError>(
      [] { Muon({torch::ones({4})}); },
      AllOf(HasSubstr("Muon: parameter 0 of group 0: shape [4] is no matrix"),
            HasSubstr("another optimizer")));
  expect_error<c10::ValueError>(
      [&] {
        Muon({matrix, torch::ones({2, 4, 4})});
      },
      HasSubstr("parameter 1 of group 0: shape [2, 4, 4]"));
  expect_error<c10::ValueError>([&] { Muon({matrix}, MuonOptions(1e-2).matrix_rows(3)); },
                                HasSubstr("not divided by matrix_rows = 3"));
  expect_error<c10::NotImplementedError>(
      [] {
        Muon({torch::ones({4, 4}, torch::kComplexFloat)});
      },
      HasSubstr("is complex"));
  expect_error<c10::ValueError>([] { Muon(std::vector<torch::Tensor>{}); },
                                HasSubstr("group 0 has no parameters"));
  expect_error<c10::ValueError>([&] { Muon({matrix}, MuonOptions(-1)); }, HasSubstr("lr is -1"));
  expect_error<c10::ValueError>([&] { Muon({matrix}, MuonOptions(1).ns_steps(100)); },
                                HasSubstr("ns_steps is 100, expected 0 to 99"));
  expect_error<c10::ValueError>([&] { Muon({matrix}, MuonOptions(1).momentum(-0.1)); },
                                HasSubstr("momentum is -0.1"));
}

TEST(Muon, RefusesSparseAndPartialGradientsBeforeAnythingChanges) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const torch::Tensor param = distribute_tensor(values_of({4, 4}, 1), mesh, {Shard{0}});
    Muon muon({param}, MuonOptions(2e-2));
    param.mutable_grad() = from_local(values_of({4, 4}, 2), mesh, {Partial{}});
    expect_error<c10::NotImplementedError>([&] { muon.step(); }, HasSubstr("is Partial"));
    EXPECT_TRUE(torch::equal(full_value(param), values_of({4, 4}, 1)));
    EXPECT_TRUE(muon.state().empty());
  });
}

}  // namespace
}  // namespace fsdp
