// Batches that are cut along the sequence (context parallelism), beside one device: the
// model's code is unchanged, and each parameter's gradient is sent once, over data and
// sequence together; also where tensor parallelism cuts the model.
#include "dtensor/context_parallel.h"

#include "dtensor/redistribute/comm_listener.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"

namespace fsdp::testing {
namespace {

using programs::Transformer;
using programs::TransformerConfig;

struct Setting {
  int64_t dp, cp;
  int64_t heads = 3, kv_heads = 3;
  int64_t tokens = 8;
  int64_t blocks_of_sequence = 1;  // Shard::outer
  SequenceAttention how = SequenceAttention::kCheapest;
  int64_t tp = 1;
  bool cuts_activations = false;  // tensor parallelism does, along the sequence
};

constexpr int64_t kHeadWidth = 8;

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  const Setting& of = info.param;
  return "Dp" + std::to_string(of.dp) + "Cp" + std::to_string(of.cp) + "Heads" +
         std::to_string(of.heads) + "Of" + std::to_string(of.kv_heads) + "Tokens" +
         std::to_string(of.tokens) + "In" + std::to_string(of.blocks_of_sequence) + "By" +
         std::to_string(static_cast<int>(of.how)) + "Tp" + std::to_string(of.tp) +
         (of.cuts_activations ? "Cut" : "");
}

class ContextParallel : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { set_sequence_attention(GetParam().how); }
  void TearDown() override { set_sequence_attention(SequenceAttention::kCheapest); }

  static Transformer model() {
    return drawn(3, [] {
      return Transformer(TransformerConfig{.vocab = 33,
                                           .width = kHeadWidth * GetParam().heads,
                                           .blocks = 2,
                                           .heads = GetParam().heads,
                                           .kv_heads = GetParam().kv_heads,
                                           .max_tokens = GetParam().tokens});
    });
  }

  static at::Tensor loss(Transformer& model, const at::Tensor& tokens, const at::Tensor& labels) {
    return torch::nn::functional::cross_entropy(model->forward(tokens).flatten(0, 1),
                                                labels.flatten());
  }
};

TEST_P(ContextParallel, StepsEqualOneDevice) {
  const Setting& of = GetParam();
  run_ranks(of.dp * of.cp * of.tp, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {of.dp, of.cp, of.tp}, {"dp", "cp", "tp"});
    Transformer plain = model(), sharded = model();
    if (of.tp > 1) {
      parallelize_module(*sharded, mesh["tp"],
                         programs::transformer_plan(kHeadWidth, of.cuts_activations));
    }
    const auto of_unit = mesh.flatten({"dp", "cp"}, "data")["data"];
    for (auto& block : sharded->blocks) fully_shard(*block, of_unit);
    fully_shard(*sharded, of_unit);
    const auto text = drawn_from_seed(4, [&] {
      return torch::randint(33, {of.dp, 2, of.tokens + 1});
    });
    const auto cut = [&](const at::Tensor& whole) {
      return distribute_tensor(whole, mesh["cp"],
                               {Shard{.dim = 1, .outer = of.blocks_of_sequence}});
    };
    int64_t moved_gradients = 0;
    const internal::CommListener listener([&](const internal::CommEvent& event) {
      const bool is_sum = event.kind == internal::CollectiveKind::kAllReduce ||
                          event.kind == internal::CollectiveKind::kReduceScatter;
      const bool is_over_sequence =
          event.mesh.dim_names()[static_cast<size_t>(event.mesh_dim)] == "cp";
      if (event.cause == internal::CommCause::kGradient && is_sum && is_over_sequence &&
          event.bytes > 8)
        ++moved_gradients;
    });
    expect_same_adamw_steps(*sharded, *plain, 3, [&](int step) {
      loss(plain, text.narrow(2, 0, of.tokens).flatten(0, 1),
           text.narrow(2, 1, of.tokens).flatten(0, 1))
          .backward();
      const auto own = text[mesh.coordinate()[0]];
      loss(sharded, cut(own.narrow(1, 0, of.tokens)), cut(own.narrow(1, 1, of.tokens))).backward();
      expect_same_gradients(*sharded, *plain, step == 0 ? kClose : kCloseLater);
    });
    EXPECT_EQ(moved_gradients, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Settings, ContextParallel,
    ::testing::Values(
        Setting{1, 2}, Setting{2, 2}, Setting{1, 3, 2, 2, 7}, Setting{1, 4, 4, 2, 10},
        Setting{2, 2, 4, 1}, Setting{1, 2, 1, 1, 8, 4},
        Setting{1, 3, 3, 3, 9, 3, SequenceAttention::kRing},
        Setting{2, 2, 4, 2, 8, 2, SequenceAttention::kGathered},
        Setting{1, 4, 1, 1, 16, 4, SequenceAttention::kRing},
        Setting{.dp = 1, .cp = 2, .heads = 2, .kv_heads = 2, .tp = 2},
        Setting{.dp = 2, .cp = 2, .heads = 4, .kv_heads = 2, .tp = 2},
        Setting{.dp = 1,
                .cp = 2,
                .heads = 4,
                .kv_heads = 4,
                .blocks_of_sequence = 2,
                .how = SequenceAttention::kRing,
                .tp = 3},
        Setting{.dp = 1, .cp = 2, .heads = 4, .kv_heads = 4, .tp = 2, .cuts_activations = true},
        Setting{.dp = 2, .cp = 3, .heads = 3, .kv_heads = 1, .tokens = 12, .tp = 1}),
    name_of);

}  // namespace
}  // namespace fsdp::testing
