// The example's transformer, unchanged, on one device and over the ranks.
#include "programs/trainer/model/transformer.h"

#include "dtensor/dtensor.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/transformer_plan.h"

namespace fsdp::testing {
namespace {

using programs::Transformer;
using programs::TransformerConfig;

struct Shape {
  TransformerConfig config;
  int64_t batch, tokens;
};

void compare(const Shape& shape, const DeviceMesh& mesh, bool cut_sequence) {
  const auto& config = shape.config;
  const auto make = [&] { return Transformer(config); };
  auto plain = drawn(3, make), parallel = drawn(3, make);
  parallelize_module(parallel, mesh, transformer_plan(config.width / config.heads, cut_sequence));
  const at::Tensor text = drawn_from_seed(4, [&] {
    return torch::randint(config.vocab, {shape.batch, shape.tokens + 1});
  });
  const at::Tensor tokens = text.narrow(1, 0, shape.tokens),
                   targets = text.narrow(1, 1, shape.tokens);
  const at::Tensor wanted = transformer_loss(plain->forward(tokens), targets);
  const at::Tensor found = transformer_loss(parallel->forward(tokens), targets);
  EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), 1e-11);
  wanted.backward();
  found.backward();
  expect_same_gradients(*parallel, *plain, 1e-11);
}

const Shape kEven = {
    {.vocab = 64, .width = 24, .blocks = 2, .heads = 6, .kv_heads = 6, .max_tokens = 8}, 2, 8};
const Shape kUneven = {
    {.vocab = 67, .width = 28, .blocks = 2, .heads = 7, .kv_heads = 7, .max_tokens = 8}, 2, 5};
const Shape kGrouped = {
    {.vocab = 67, .width = 40, .blocks = 1, .heads = 10, .kv_heads = 5, .max_tokens = 8}, 2, 5};
const Shape kFewKeys = {
    {.vocab = 33, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 1, .max_tokens = 8}, 2, 5};

class TensorParallelTransformer : public Worlds {
 protected:
  void compare_on_ranks(const Shape& shape) {
    for (const bool cut_sequence : {false, true}) {
      SCOPED_TRACE(cut_sequence);
      on_ranks([&](int64_t, const DeviceMesh& mesh) { compare(shape, mesh, cut_sequence); });
    }
  }
};

TEST_P(TensorParallelTransformer, EqualsOneDevice) { compare_on_ranks(kEven); }
TEST_P(TensorParallelTransformer, EqualsOneDeviceWithSevenHeads) { compare_on_ranks(kUneven); }
TEST_P(TensorParallelTransformer, EqualsOneDeviceWithFiveKeyHeads) { compare_on_ranks(kGrouped); }
TEST_P(TensorParallelTransformer, EqualsOneDeviceWithARankWithoutKeys) {
  compare_on_ranks(kFewKeys);
}

INSTANTIATE_WORLDS(TensorParallelTransformer, 1, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
