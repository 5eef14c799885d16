// LibTorch's own modules, unchanged, cut over "tp" and sharded over "dp", beside one
// device: three steps of AdamW.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/mesh_settings.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

TEST(ShardedModulesOnAnotherDevice, AreRefusedWithTheDeviceTypesOfBothMeshes) {
  run_ranks(1, [](int64_t) {
    torch::nn::Sequential model(torch::nn::Linear(4, 6));
    parallelize_module(model, init_device_mesh(torch::kCPU, {1}), {{"0", ColwiseParallel{}}});
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/1);
    const auto elsewhere = DeviceMesh::from_group(group, c10::kCUDA, {0});
    expect_error<c10::ValueError>(
        [&] { fully_shard(model, elsewhere); },
        ::testing::AllOf(::testing::HasSubstr("'0.weight'"), ::testing::HasSubstr("type cpu"),
                         ::testing::HasSubstr("of type cuda")));
  });
}

// A CPU tensor may carry the index 0 or none: two devices as far as the library can see.
TEST(ShardedModulesOnAnotherDevice, MembersOnAnotherIndexThanTheirUnitAreRefusedByName) {
  run_ranks(1, [](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {1, 1}, {"dp", "tp"});
    torch::nn::Sequential model(torch::nn::Linear(4, 6));
    parallelize_module(model, mesh["tp"], {{"0", ColwiseParallel{}}});
    std::vector<float> memory(16, 0.5F);
    model->register_parameter(
        "elsewhere",
        at::for_blob(memory.data(), {4, 4}).target_device(at::Device(at::kCPU, 0)).make_tensor());
    expect_error<c10::ValueError>(
        [&] { fully_shard(model, mesh["dp"]); },
        ::testing::AllOf(::testing::HasSubstr("'0.weight' is on cpu but"),
                         ::testing::HasSubstr("'elsewhere' of the same unit on cpu:0"),
                         ::testing::HasSubstr("one device")));
    EXPECT_FALSE(is_fsdp_module(*model));
  });
}

// This data rank's part of what all have.
at::Tensor own_batch(const at::Tensor& all, int64_t batch_dim, const DeviceMesh& mesh) {
  const auto index = static_cast<size_t>(mesh["dp"].local_rank());
  return all.chunk(mesh["dp"].size(), batch_dim)[index];
}

Tensors recorded(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.clone().requires_grad_());
  return leaves;
}

// One module twice, and what it is given: the batches of all data ranks, along
// `batch_dim`.
template <class Module>
class SideBySideModules {
 public:
  using Run = std::function<at::Tensor(Module& module, const Tensors& inputs)>;

  template <class Make>
  SideBySideModules(const DeviceMesh& mesh, const Make& make, const ParallelPlan& plan,
                    const Run& run, Tensors inputs, int64_t batch_dim)
      : mesh_(mesh),
        run_(run),
        inputs_(std::move(inputs)),
        batch_dim_(batch_dim),
        plain_(drawn(1, make)),
        sharded_(drawn(1, make)) {
    parallelize_module(sharded_, mesh["tp"], plan);
    fully_shard(sharded_, mesh["dp"]);
  }

  void compare_steps() {
    expect_same_adamw_steps(*sharded_, *plain_, 3,
                            [this](int step) { compare_step(step == 0 ? kClose : kCloseLater); });
  }

 private:
  using Holder = torch::nn::ModuleHolder<Module>;

  // The batches have one size, so the mean over all is that of the data ranks' means.
  void compare_step(double tolerance) {
    const Tensors theirs = recorded(inputs_), ours = recorded(own(inputs_));
    const at::Tensor wanted = run_(*plain_, theirs), found = run_(*sharded_, ours);
    EXPECT_LE(distance(full_tensor(found.detach()), own_batch(wanted.detach(), batch_dim_, mesh_)),
              tolerance);
    wanted.pow(3).mean().backward();
    found.pow(3).mean().backward();
    expect_same_gradients(*sharded_, *plain_, tolerance);
    const auto ranks = mesh_["dp"].size();
    for (size_t i = 0; i < ours.size(); ++i) {
      const at::Tensor of_own = own_batch(theirs[i].grad(), batch_dim_, mesh_) * ranks;
      EXPECT_FALSE(is_dtensor(ours[i].grad()));
      EXPECT_LE(distance(ours[i].grad(), of_own), tolerance) << "input " << i;
    }
  }
  Tensors own(const Tensors& inputs) const {
    Tensors parts;
    for (const at::Tensor& input : inputs) parts.push_back(own_batch(input, batch_dim_, mesh_));
    return parts;
  }

  DeviceMesh mesh_;
  Run run_;
  Tensors inputs_;
  int64_t batch_dim_;
  Holder plain_, sharded_;
};

// Five heads on four ranks leave one without any.
constexpr int64_t kHeadCounts[] = {5, 7};
constexpr int64_t kWidthOfHeads = 4;

class ShardedModules : public OnMeshes {
 protected:
  using Attention = SideBySideModules<torch::nn::MultiheadAttentionImpl>;

  static Placement between(int64_t sequence_dim) {
    return cuts_sequence() ? Placement(Shard{sequence_dim}) : Replicate{};
  }
  // Of texts of so many tokens each.
  static void compare_attention(const std::vector<int64_t>& tokens, const Attention::Run& run) {
    const ParallelPlan plan = {{"", ColwiseParallel{.output_layout = between(0), .sections = 3}}};
    for (const int64_t heads : kHeadCounts) {
      const int64_t width = heads * kWidthOfHeads;
      on_ranks([&](const DeviceMesh& mesh) {
        Tensors texts;
        for (const int64_t length : tokens)
          texts.push_back(drawn_tensor(2 + texts.size(), {length, 4, width}));
        Attention(
            mesh, [&] { return torch::nn::MultiheadAttention(width, heads); }, plan, run, texts,
            /*batch_dim=*/1)
            .compare_steps();
      });
    }
  }
};

struct NormedMlpImpl : torch::nn::Module {
  explicit NormedMlpImpl(int64_t hidden)
      : up(register_module("up", torch::nn::Linear(6, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, 6))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(x + down(torch::gelu(up(norm(x))))); }
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  torch::nn::LayerNorm last =
      register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  torch::nn::Linear up, down;
};
TORCH_MODULE(NormedMlp);

TEST_P(ShardedModules, AnMlpIsThatOfOneDevice) {
  ParallelPlan plan = {{"up", ColwiseParallel{}},
                       {"down", RowwiseParallel{.output_layout = between(1)}}};
  if (cuts_sequence()) {
    plan.emplace_back("norm", SequenceParallel{});
    plan.emplace_back("last", SequenceParallel{});
  }
  for (const int64_t hidden : {16, 7}) {
    on_ranks([&](const DeviceMesh& mesh) {
      SideBySideModules<NormedMlpImpl>(
          mesh, [&] { return NormedMlp(hidden); }, plan,
          [](NormedMlpImpl& mlp, const Tensors& inputs) { return mlp.forward(inputs[0]); },
          {drawn_tensor(2, {4, 5, 6})}, /*batch_dim=*/0)
          .compare_steps();
    });
  }
}

TEST_P(ShardedModules, AttentionOfATextToItselfIsThatOfOneDevice) {
  compare_attention({5}, [](auto& attention, const Tensors& texts) {
    return std::get<0>(attention.forward(texts[0], texts[0], texts[0]));
  });
}

TEST_P(ShardedModules, AttentionOfATextToAnotherIsThatOfOneDevice) {
  compare_attention({5, 3}, [](auto& attention, const Tensors& texts) {
    return std::get<0>(attention.forward(texts[0], texts[1], texts[1]));
  });
}

TEST_P(ShardedModules, AnEncoderLayerIsThatOfOneDevice) {
  ParallelPlan plan = {{"self_attn", ColwiseParallel{.output_layout = between(0), .sections = 3}},
                       {"linear1", ColwiseParallel{}},
                       {"linear2", RowwiseParallel{.output_layout = between(0)}}};
  if (cuts_sequence()) plan.emplace_back("norm*", SequenceParallel{.sequence_dim = 0});
  for (const int64_t heads : kHeadCounts) {
    const auto make = [&] {
      return torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(heads * kWidthOfHeads, heads)
              .dim_feedforward(26)
              .dropout(0));
    };
    on_ranks([&](const DeviceMesh& mesh) {
      SideBySideModules<torch::nn::TransformerEncoderLayerImpl>(
          mesh, make, plan,
          [](auto& layer, const Tensors& inputs) { return layer.forward(inputs[0]); },
          {drawn_tensor(2, {5, 4, heads * kWidthOfHeads})}, /*batch_dim=*/1)
          .compare_steps();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedModules, ::testing::ValuesIn(every_mesh()), name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
