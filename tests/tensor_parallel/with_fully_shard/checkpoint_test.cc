// Checkpoints of models that are cut over "tp" and sharded over "dp": what one mesh
// saved, another loads.
#include "checkpoint/checkpoint.h"

#include "fully_shard/fully_shard.h"
#include "tests/support/temporary_folder.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <string>

namespace fsdp::testing {
namespace {

constexpr ShardedPair::Config kSaved{
    .vocab = 67, .width = 20, .blocks = 1, .heads = 5, .kv_heads = 5, .max_tokens = 8};

torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(1e-2).eps(1e-3); }

void step(ShardedPair& pair, torch::optim::AdamW& plain, torch::optim::AdamW& sharded) {
  plain.zero_grad();
  sharded.zero_grad();
  pair.backward();
  plain.step();
  sharded.step();
}

// Other values than those saved.
void spoil(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.fill_(7);
}

// A step with what was loaded is the second step of the plain model.
void load_and_step(const std::string& folder, const DeviceMesh& mesh, bool cut_sequence) {
  ShardedPair pair(kSaved, mesh, cut_sequence);
  torch::optim::AdamW theirs(pair.plain->parameters(), adamw());
  torch::optim::AdamW ours(pair.sharded->parameters(), adamw());
  pair.text = pair.text[0].repeat({mesh["dp"].size(), 1, 1});
  theirs.zero_grad();
  pair.plain_loss().backward();
  theirs.step();
  spoil(*pair.sharded);
  load({.model = pair.sharded, .optimizer = ours}, folder);
  pair.expect_same_values(1e-9);
  step(pair, theirs, ours);
  pair.expect_same_values(1e-9);
}

void save_after_a_step(const std::string& folder, const DeviceMesh& mesh, bool cut_sequence) {
  ShardedPair pair(kSaved, mesh, cut_sequence);
  torch::optim::AdamW theirs(pair.plain->parameters(), adamw());
  torch::optim::AdamW ours(pair.sharded->parameters(), adamw());
  pair.text = pair.text[0].repeat({mesh["dp"].size(), 1, 1});
  step(pair, theirs, ours);
  save({.model = pair.sharded, .optimizer = ours}, folder);
}

DeviceMesh mesh_of(int64_t dp, int64_t tp) {
  return init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
}

TEST(ShardedCheckpoint, OneMeshLoadsWhatAnotherSaved) {
  for (const bool cut_sequence : {false, true}) {
    const TemporaryFolder folder;
    const std::string path = folder / "step";
    run_ranks(8, [&](int64_t) { save_after_a_step(path, mesh_of(4, 2), cut_sequence); });
    run_ranks(8, [&](int64_t) { load_and_step(path, mesh_of(2, 4), cut_sequence); });
    run_ranks(3, [&](int64_t) { load_and_step(path, mesh_of(3, 1), cut_sequence); });
    run_ranks(3, [&](int64_t) { load_and_step(path, mesh_of(1, 3), cut_sequence); });
  }
}

// A unit without a parameter that is cut over tp: the root's is the last norm.
TEST(ShardedCheckpoint, HasUnitsThatTensorParallelismDoesNotCut) {
  for (const int64_t dp : {1, 2}) {
    const TemporaryFolder folder;
    auto plain = drawn(3, [] { return programs::Transformer(kSaved); });
    run_ranks(2 * dp, [&](int64_t) {
      const auto mesh = mesh_of(dp, 2);
      auto model = drawn(3, [] { return programs::Transformer(kSaved); });
      parallelize_module(model, mesh["tp"],
                         transformer_plan(kSaved.width / kSaved.heads, /*cut_sequence=*/false));
      fully_shard(model->embedding, mesh["dp"]);
      fully_shard(model->head, mesh["dp"]);
      for (auto& block : model->blocks) fully_shard(*block, mesh["dp"]);
      fully_shard(*model, mesh["dp"]);
      torch::optim::AdamW optimizer(model->parameters(), adamw());
      const auto text = torch::arange(12).view({2, 6});
      ShardedPair::loss(model, text).backward();
      optimizer.step();
      save({.model = model, .optimizer = optimizer}, folder / "step");
      const auto saved = full_value(model->norm->named_parameters()["weight"]);
      spoil(*model);
      load({.model = model, .optimizer = optimizer}, folder / "step");
      EXPECT_TRUE(full_value(model->norm->named_parameters()["weight"]).equal(saved));
    });
    load({.model = plain}, folder / "step");
    EXPECT_FALSE(plain->norm->named_parameters()["weight"].equal(torch::ones({kSaved.width})));
  }
}

TEST(ShardedCheckpoint, APlainModelLoadsIt) {
  const TemporaryFolder folder;
  const std::string path = folder / "step";
  run_ranks(4, [&](int64_t) { save_after_a_step(path, mesh_of(2, 2), true); });
  auto plain = drawn(3, [] { return programs::Transformer(kSaved); });
  run_ranks(4, [&](int64_t) {
    ShardedPair pair(kSaved, mesh_of(2, 2), true);
    load({.model = pair.sharded}, path);
    auto loaded = drawn(5, [] { return programs::Transformer(kSaved); });
    load({.model = loaded}, path);
    for (const auto& item : pair.sharded->named_parameters()) {
      EXPECT_TRUE(full_value(item.value()).equal(loaded->named_parameters()[item.key()]))
          << item.key();
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
