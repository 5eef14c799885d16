// A plain transformer, and the same one cut over "tp" and sharded over "dp", or over
// "replicate" and "dp".
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/model/transformer.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <functional>

namespace fsdp::testing {

struct ShardedPair {
  using Config = programs::TransformerConfig;

  DeviceMesh mesh;  // {"dp", "tp"}, or {"replicate", "dp", "tp"}
  programs::Transformer plain, sharded;
  at::Tensor text;  // [batches of ranks, batch, tokens + 1]

  ShardedPair(const Config& config, const DeviceMesh& on, bool cut_sequence,
              const FullyShardOptions& options = {}, c10::ScalarType dtype = torch::kFloat64)
      : mesh(on),
        plain(drawn(
            3, [&] { return programs::Transformer(config); }, dtype)),
        sharded(drawn(
            3, [&] { return programs::Transformer(config); }, dtype)) {
    parallelize_module(sharded, mesh["tp"],
                       transformer_plan(config.width / config.heads, cut_sequence));
    for (auto& block : sharded->blocks) fully_shard(*block, data_mesh(), options);
    fully_shard(*sharded, data_mesh(), options);
    text = drawn_from_seed(4, [&] {
      return torch::randint(config.vocab, {data_mesh().size(), 2, 6});
    });
  }

  DeviceMesh data_mesh() const { return mesh.ndim() == 3 ? mesh[{"replicate", "dp"}] : mesh["dp"]; }
  // Of the batches.
  int64_t data_rank() const { return mesh.rank() / mesh["tp"].size(); }

  static at::Tensor loss(programs::Transformer& model, const at::Tensor& of) {
    return transformer_loss(model->forward(of.narrow(1, 0, 5)), of.narrow(1, 1, 5));
  }
  // The batches of all ranks have the same size, so the mean of their losses is that of
  // all.
  at::Tensor plain_loss() { return loss(plain, text.flatten(0, 1)); }
  at::Tensor sharded_loss() { return loss(sharded, text[data_rank()]); }
  void backward() {
    plain_loss().backward();
    sharded_loss().backward();
  }
  // Of this data rank's batch.
  void expect_same_losses(double tolerance) {
    const torch::NoGradGuard no_grad;
    EXPECT_LE(distance(full_tensor(sharded_loss()), loss(plain, text[data_rank()])), tolerance);
  }
  void expect_same_gradients(double tolerance = kClose) {
    testing::expect_same_gradients(*sharded, *plain, tolerance);
  }
  // Of AdamW, from which only the first's gradients are as close as one pass leaves them.
  void expect_same_steps(int steps) {
    testing::expect_same_adamw_steps(*sharded, *plain, steps, [this](int step) {
      backward();
      expect_same_gradients(step == 0 ? kClose : kCloseLater);
    });
  }
  void expect_same_values(double tolerance) {
    testing::expect_same_values(*sharded, *plain, tolerance);
  }
};

// `body` on each rank of a world of dp x tp.
inline void on_pairs(const ShardedPair::Config& config, int64_t dp, int64_t tp, bool cut_sequence,
                     const FullyShardOptions& options,
                     const std::function<void(ShardedPair&)>& body) {
  run_ranks(dp * tp, [&](int64_t) {
    ShardedPair pair(config, init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"}), cut_sequence,
                     options);
    body(pair);
  });
}

}  // namespace fsdp::testing
