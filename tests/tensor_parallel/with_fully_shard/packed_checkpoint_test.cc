// Checkpoints of packed projections: query, key and value in one matrix of 5 heads, of
// which each rank of "tp" has some rows of each, and each rank of "dp" some of those.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/inspect.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/issued_collectives.h"

#include <filesystem>
#include <map>
#include <memory>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int64_t kPackedWidth = 20, kPackedHeads = 5;
constexpr const char* kPacked = "self_attn.in_proj_weight";

struct PackedTraining {
  using Layer = torch::nn::TransformerEncoderLayer;

  Layer layer;
  std::unique_ptr<torch::optim::AdamW> optimizer;

  // dp = 0: without fully_shard; tp = 0: the plain layer.
  PackedTraining(int64_t dp, int64_t tp) : layer(drawn(1, make)) {
    if (tp > 0) cut(dp, tp);
    optimizer = std::make_unique<torch::optim::AdamW>(layer->parameters(), 1e-2);
  }

  static Layer make() {
    auto options = torch::nn::TransformerEncoderLayerOptions(kPackedWidth, kPackedHeads);
    return Layer(options.dim_feedforward(26).dropout(0));
  }

  void cut(int64_t dp, int64_t tp) {
    const ParallelPlan plan = {{"self_attn", ColwiseParallel{.sections = 3}},
                               {"linear1", ColwiseParallel{}},
                               {"linear2", RowwiseParallel{}}};
    if (dp == 0) {
      parallelize_module(layer, init_device_mesh(c10::kCPU, {tp}, {"tp"}), plan);
      return;
    }
    const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
    parallelize_module(layer, mesh["tp"], plan);
    fully_shard(layer, mesh["dp"]);
  }

  void step() {
    optimizer->zero_grad();
    layer->forward(drawn_tensor(2, {6, 3, kPackedWidth})).pow(3).sum().backward();
    optimizer->step();
  }

  // Other values than those saved.
  void spoil() {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layer->parameters()) parameter.fill_(7);
  }

  State state() { return {.model = layer, .optimizer = optimizer}; }

  // Parameters and what AdamW keeps of each, whole. Collective.
  std::map<std::string, at::Tensor> values() {
    std::map<std::string, at::Tensor> all;
    for (const auto& item : layer->named_parameters())
      all[item.key()] = full_value(item.value()).clone();
    const auto dict = get_optimizer_state_dict(*layer, *optimizer, {.full_state_dict = true});
    for (const auto& [name, fields] : dict.state) {
      for (const auto& [field, value] : fields) {
        if (value.isTensor()) all[name + "." + field] = value.toTensor();
      }
    }
    return all;
  }
};

void expect_equal(const std::map<std::string, at::Tensor>& found,
                  const std::map<std::string, at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, value] : wanted) EXPECT_TRUE(found.at(name).equal(value)) << name;
}

struct PackedMesh {
  int64_t dp, tp;
  int64_t ranks() const { return std::max<int64_t>(dp, 1) * std::max<int64_t>(tp, 1); }
};

// Saves after a step at `mesh`; what was saved, whole.
std::map<std::string, at::Tensor> save_packed(const PackedMesh& mesh, const std::string& path,
                                              const SaveOptions& options = {}) {
  std::map<std::string, at::Tensor> saved;
  run_ranks(mesh.ranks(), [&](int64_t rank) {
    PackedTraining training(mesh.dp, mesh.tp);
    training.step();
    const auto values = training.values();
    if (rank == 0) saved = values;
    save(training.state(), path, options);
  });
  return saved;
}

// What `mesh` loads is `wanted`.
void expect_loads(const PackedMesh& mesh, const std::string& path,
                  const std::map<std::string, at::Tensor>& wanted) {
  SCOPED_TRACE(std::to_string(mesh.dp) + " x " + std::to_string(mesh.tp));
  run_ranks(mesh.ranks(), [&](int64_t) {
    PackedTraining training(mesh.dp, mesh.tp);
    training.spoil();
    load(training.state(), path);
    expect_equal(training.values(), wanted);
  });
}

TEST(PackedCheckpoint, EveryMeshLoadsWhatEveryOtherSavedBitForBit) {
  for (const PackedMesh& saving : {PackedMesh{2, 2}, {1, 3}, {0, 4}, {0, 0}, {3, 2}}) {
    SCOPED_TRACE("saved by " + std::to_string(saving.dp) + " x " + std::to_string(saving.tp));
    const TemporaryFolder folder(memory_folder());
    const auto saved = save_packed(saving, folder / "step");
    EXPECT_GT(saved.at(std::string(kPacked) + ".exp_avg").abs().max().item<double>(), 0);
    for (const PackedMesh& mesh : {PackedMesh{2, 2}, {1, 3}, {4, 1}, {0, 4}, {0, 0}, {2, 3}})
      expect_loads(mesh, folder / "step", saved);
  }
}

TEST(PackedCheckpoint, ARankWritesItsBoxesAndGathersNothing) {
  const WithEnvironment c10d_is_asked("FSDP_PEER_MEMORY", "off");
  const TemporaryFolder folder(memory_folder());
  run_ranks(4, [&](int64_t) {
    PackedTraining training(2, 2);
    training.step();
    const IssuedCollectives issued;
    save({.values = {{"step", 1}}}, folder / "nothing");
    const auto agreements = IssuedCollectives::take();
    save(training.state(), folder / "step");
    EXPECT_EQ(IssuedCollectives::take(), agreements);
    save(training.state(), folder / "full", {.layout = Layout::kFull});
    EXPECT_NE(IssuedCollectives::take(), agreements);
  });
  // Heads 0 to 2 of 5 are those of tp rank 0: 12 rows of each section, of which dp rank 0
  // has the first 18: all of the queries and half of the keys.
  const std::string text = describe_checkpoint(folder / "step");
  EXPECT_THAT(text, HasSubstr("S(0, outer=3, unit=4) S(0) over 2 x 2 ranks"));
  verify_checkpoint(folder / "step");
  const std::string model = folder / "step/model/";
  EXPECT_TRUE(fs::exists(model + "shard-00001-box-00002.safetensors"));
  EXPECT_FALSE(fs::exists(model + "shard-00001-box-00003.safetensors"));
}

TEST(PackedCheckpoint, TheFullLayoutIsThatOfThePlainModelByteForByte) {
  const TemporaryFolder folder(memory_folder());
  const auto saved = save_packed({2, 2}, folder / "full", {.layout = Layout::kFull});
  run_ranks(1, [&](int64_t) {
    PackedTraining plain(0, 0);
    plain.step();
    load(plain.state(), folder / "full");
    expect_equal(plain.values(), saved);
    save(plain.state(), folder / "plain", {.layout = Layout::kFull});
  });
  convert_checkpoint(folder / "full", folder / "sharded", {.layout = Layout::kSharded, .ranks = 3});
  save_packed({2, 2}, folder / "boxes");
  convert_checkpoint(folder / "boxes", folder / "converted");
  const auto bytes_of = [&](const std::string& name, const std::string& item) {
    return internal::checkpoint::read_file(folder / name + "/" + item + "/model.safetensors")
        .value();
  };
  for (const char* item : {"model", "optimizer"}) {
    EXPECT_EQ(bytes_of("full", item), bytes_of("plain", item)) << item;
  }
  for (const PackedMesh& mesh : {PackedMesh{2, 2}, {0, 3}}) {
    expect_loads(mesh, folder / "full", saved);
    expect_loads(mesh, folder / "sharded", saved);
    expect_loads(mesh, folder / "converted", saved);
  }
}

TEST(PackedCheckpoint, IsSavedInTheBackgroundAsItWas) {
  const TemporaryFolder folder(memory_folder());
  for (const int64_t staged : {int64_t{0}, int64_t{4096}, INT64_MAX}) {
    const std::string path = folder / ("step" + std::to_string(staged));
    std::map<std::string, at::Tensor> saved;
    run_ranks(4, [&](int64_t rank) {
      PackedTraining training(2, 2);
      training.step();
      const auto values = training.values();
      if (rank == 0) saved = values;
      auto saving = async_save(training.state(), path, {}, {.staging_bytes = staged});
      training.spoil();
      saving.wait();
    });
    expect_loads({1, 3}, path, saved);
  }
}

TEST(PackedCheckpoint, StateDictsAreThoseOfThePlainModel) {
  run_ranks(4, [](int64_t rank) {
    PackedTraining training(2, 2), other(2, 2), plain(0, 0);
    training.step();
    const auto values = training.values();
    for (const bool sends : {false, true}) {
      const StateDictOptions get{.full_state_dict = true, .cpu_offload = sends};
      const StateDictOptions set{.full_state_dict = true, .broadcast_from_rank0 = sends};
      const auto model = get_model_state_dict(*training.layer, get);
      const auto optimizer = get_optimizer_state_dict(*training.layer, *training.optimizer, get);
      other.spoil();
      set_model_state_dict(*other.layer, model, set);
      set_optimizer_state_dict(*other.layer, *other.optimizer, optimizer, set);
      expect_equal(other.values(), values);
      if (sends && rank != 0) continue;
      plain.spoil();
      set_model_state_dict(*plain.layer, model);
      for (const auto& item : plain.layer->named_parameters())
        EXPECT_TRUE(item.value().equal(values.at(item.key()))) << item.key();
    }
    for (const bool local : {false, true}) {
      const StateDictOptions options{.local = local};
      other.spoil();
      set_model_state_dict(*other.layer, get_model_state_dict(*training.layer, options), options);
      set_optimizer_state_dict(
          *other.layer, *other.optimizer,
          get_optimizer_state_dict(*training.layer, *training.optimizer, options), options);
      expect_equal(other.values(), values);
    }
  });
}

TEST(PackedCheckpoint, ABoxThatIsMissingIsNamed) {
  const TemporaryFolder folder(memory_folder());
  save_packed({2, 2}, folder / "step");
  const std::string second = folder / "step/model/shard-00001-box-00002.safetensors";
  fs::resize_file(second, fs::file_size(second) - 1);
  run_ranks(2, [&](int64_t) {
    PackedTraining training(0, 2);
    EXPECT_THAT(message_of([&] { load({.model = training.layer}, folder / "step"); }),
                HasSubstr("shard-00001-box-00002.safetensors"));
  });
}

}  // namespace
}  // namespace fsdp::testing
