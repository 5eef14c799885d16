// Checkpoints of Muon and of MuonWithAdamW: between worlds and cuts, in memory, and to
// Python, whose Muon goes on from them.
#include "checkpoint/checkpoint.h"
#include "checkpoint/optimizer_state_dict.h"
#include "fully_shard/fully_shard.h"
#include "optim/muon_with_adamw.h"
#include "tests/checkpoint/python.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

// How a model's matrices lie. Pieces: with Outer::kShardOptimizer.
enum class Matrices { kInRows, kOnOwners, kInPieces };

std::vector<Matrices> layouts_on(const std::vector<int64_t>& mesh_shape) {
  if (mesh_shape.size() < 2) return {Matrices::kInRows, Matrices::kOnOwners};
  return {Matrices::kInRows, Matrices::kOnOwners, Matrices::kInPieces};
}

struct MuonTraining {
  explicit MuonTraining(const std::vector<int64_t>& mesh_shape,
                        Matrices matrices = Matrices::kInRows)
      : model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 4)) {
    FullyShardOptions options;
    if (matrices == Matrices::kOnOwners)
      options.shard_placement_fn = [](const auto&, const torch::Tensor& tensor) {
        return tensor.dim() == 2 ? std::optional<Placement>(Owned{}) : std::nullopt;
      };
    if (matrices == Matrices::kInPieces) options.outer = Outer::kShardOptimizer;
    if (!mesh_shape.empty()) fully_shard(model, init_device_mesh(c10::kCPU, mesh_shape), options);
    set_values(model->parameters());
    optimizer.emplace(split_for_muon(model), MuonOptions(2e-2), torch::optim::AdamWOptions(1e-2));
  }

  void step(int64_t number) {
    set_gradients(model->parameters(), number);
    optimizer->step();
  }

  State state() { return {.model = model, .optimizer = *optimizer}; }

  torch::nn::Sequential model;
  std::optional<MuonWithAdamW> optimizer;
};

void expect_values(MuonTraining& training, MuonTraining& expected) {
  const auto params = training.model->parameters(), others = expected.model->parameters();
  for (size_t i = 0; i < params.size(); ++i)
    EXPECT_TRUE(torch::equal(full_value(params[i].detach()), full_value(others[i].detach())))
        << "parameter " << i;
}

const std::vector<std::vector<int64_t>> kMuonMeshes = {{}, {1}, {2}, {3}, {2, 2}};

int64_t world_of(const std::vector<int64_t>& mesh_shape) {
  return c10::multiply_integers(mesh_shape);
}

TEST(MuonCheckpoint, GoesOnAtAnyOtherWorldWithTheSameBits) {
  MuonTraining straight({});
  straight.step(0);
  straight.step(1);
  const auto go_on = [&](const std::string& path, const auto& to, Matrices matrices) {
    run_ranks(world_of(to), [&](int64_t) {
      MuonTraining training(to, matrices);
      training.step(5);  // other values and state
      load(training.state(), path);
      training.step(1);
      expect_values(training, straight);
    });
  };
  for (const auto& from : kMuonMeshes) {
    for (const auto matrices : layouts_on(from)) {
      const TemporaryFolder folder;
      const std::string path = folder / "saved";
      run_ranks(world_of(from), [&](int64_t) {
        MuonTraining training(from, matrices);
        training.step(0);
        save(training.state(), path);
      });
      for (const auto& to : kMuonMeshes) {
        for (const auto lie : layouts_on(to)) go_on(path, to, lie);
      }
    }
  }
}

TEST(MuonCheckpoint, TravelsInMemoryByTheNamesOfParameters) {
  MuonTraining straight({});
  straight.step(0);
  const auto whole =
      get_optimizer_state_dict(*straight.model, *straight.optimizer, {.full_state_dict = true});
  EXPECT_EQ(whole.state.at("0.weight").size(), 1U);
  EXPECT_EQ(whole.state.at("0.weight").count("momentum_buffer"), 1U);
  EXPECT_EQ(whole.state.at("1.bias").count("exp_avg_sq"), 1U);
  EXPECT_EQ(whole.param_groups.size(), 2U);
  const auto values = get_model_state_dict(*straight.model, {.full_state_dict = true});
  run_ranks(2, [&](int64_t rank) {
    MuonTraining training({2});
    const bool is_first = rank == 0;
    set_model_state_dict(*training.model, is_first ? values : StateDict(),
                         {.full_state_dict = true, .broadcast_from_rank0 = true});
    set_optimizer_state_dict(*training.model, *training.optimizer,
                             is_first ? whole : OptimizerStateDict(),
                             {.full_state_dict = true, .broadcast_from_rank0 = true});
    training.step(1);
    MuonTraining other({});
    other.step(0);
    other.step(1);
    expect_values(training, other);
  });
}

// What separate optimizers saved does not come into one of both, nor the reverse.
TEST(MuonCheckpoint, OfAnotherOptimizerIsRefused) {
  const TemporaryFolder folder;
  MuonTraining training({});
  training.step(0);
  torch::optim::AdamW adamw(training.model->parameters(), torch::optim::AdamWOptions(1e-2));
  adamw.step();
  save({.model = training.model, .optimizer = adamw}, folder / "adamw");
  EXPECT_THROW(load(training.state(), folder / "adamw"), c10::ValueError);
  EXPECT_EQ(training.optimizer->state().size(), 4U);
}

TEST(MuonCheckpoint, IsReadByPythonWhoseMuonGoesOn) {
  if (!python_has_torch()) GTEST_SKIP() << kNoPython;
  const TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    MuonTraining training({2});
    training.step(0);
    save(training.state(), folder / "saved");
    training.step(1);
    save({.model = training.model}, folder / "next", {.layout = Layout::kFull});
  });
  EXPECT_EQ(run_python("continue_muon.py", (folder / "saved") + " " + (folder / "next")), 0);
}

}  // namespace
}  // namespace fsdp::testing
