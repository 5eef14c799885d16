// What a piece of a program sends: the effect that an option has, where values cannot
// show it.
//
//   MeasuredDecoder decoder(mesh, {.reshard_after_forward = false});
//   EXPECT_EQ(decoder.forward().all_gathers, 7);
//   EXPECT_EQ(decoder.backward().all_gathers, 0);
#pragma once

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/resident_bytes.h"

#include <torch/torch.h>

#include <functional>
#include <memory>

namespace fsdp::testing {

// The counter of that name, or 0 where Counters has none yet.
template <class C = Counters>
int64_t unused_prefetches(const C& counters) {
  if constexpr (requires { counters.unused_prefetches; }) {
    return counters.unused_prefetches;
  } else {
    return 0;
  }
}

struct Traffic {
  int64_t all_gathers = 0;
  int64_t prefetched = 0;  // of all_gathers
  int64_t unused = 0;      // of prefetched; 0 where Counters does not tell
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
  int64_t all_gather_bytes = 0;
};

inline Traffic traffic_of(const DeviceMesh& mesh, const std::function<void()>& body) {
  const auto before = counters(mesh);
  body();
  const auto after = counters(mesh);
  return {after.all_gathers - before.all_gathers,
          after.prefetched_all_gathers - before.prefetched_all_gathers,
          unused_prefetches(after) - unused_prefetches(before),
          after.reduce_scatters - before.reduce_scatters,
          after.all_reduces - before.all_reduces,
          after.all_gather_bytes - before.all_gather_bytes};
}

// Seven units, touched in forward in this order: embedding, four blocks, root (a norm),
// head; and in backward: head, root, the blocks from the last to the first. Backward does
// not touch the embedding.
class MeasuredDecoder {
 public:
  static constexpr int64_t kBlocks = 4, kUnits = kBlocks + 3, kWidth = 8;
  static constexpr int64_t kStepGathers =
      2 * kBlocks + 3;  // by default: root, head, embedding once

  explicit MeasuredDecoder(const DeviceMesh& mesh, const FullyShardOptions& below_root = {},
                           const FullyShardOptions& root = {})
      : mesh_(mesh) {
    const auto built = build_seeded([this] {
      model = Decoder(kWidth, kBlocks);
      return Model{model.ptr(), {}};
    });
    fully_shard(model->embedding, mesh, below_root);
    for (auto& block : model->blocks) fully_shard(block, mesh, below_root);
    fully_shard(model->head, mesh, below_root);
    fully_shard(model, mesh, root);
  }

  FSDPModule root() { return get_fsdp_module(*model); }
  FSDPModule embedding() { return get_fsdp_module(*model->embedding); }
  FSDPModule block(int64_t i) { return get_fsdp_module(*model->blocks.at(static_cast<size_t>(i))); }
  FSDPModule head() { return get_fsdp_module(*model->head); }

  Traffic forward() {
    return traffic_of(mesh_, [this] { loss_ = loss_of(model, make_data(5)); });
  }
  Traffic backward() {
    return traffic_of(mesh_, [this] { loss_.backward(); });
  }
  // A forward under no_grad.
  Traffic inference() {
    torch::NoGradGuard no_grad;
    return traffic_of(mesh_, [this] { loss_of(model, make_data(6)); });
  }
  // Forward, backward and an update.
  Traffic step() {
    const auto traffic = traffic_of(mesh_, [this] { loss_of(model, make_data(5)).backward(); });
    update();
    return traffic;
  }
  // Writes every parameter.
  void update() {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) {
      if (parameter.grad().defined()) parameter.add_(parameter.grad(), -0.01);
    }
    model->zero_grad();
  }
  int64_t resident_bytes() const { return fsdp::resident_bytes(counters(mesh_)); }

  Decoder model{nullptr};

 private:
  DeviceMesh mesh_;
  torch::Tensor loss_;
};

inline constexpr auto kBlocks = MeasuredDecoder::kBlocks;
inline constexpr auto kUnits = MeasuredDecoder::kUnits;

}  // namespace fsdp::testing
