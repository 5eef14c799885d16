// Attention as people write it themselves, with masks, and experts in one tensor: the
// heads, or the experts, are cut, and nothing moves but what the plan asks for.
#include "tensor_parallel/communication_log.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr int64_t kOwnHeads = 5, kOwnHeadWidth = 4, kOwnWidth = kOwnHeads * kOwnHeadWidth;

// Of queries, keys and values [batch, tokens, heads, head width], in the same shape.
using Attend = std::function<at::Tensor(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value)>;

at::Tensor future(int64_t tokens) { return torch::ones({tokens, tokens}).triu(1).to(torch::kBool); }

at::Tensor by_einsum(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::Tensor scores =
      torch::einsum("bthd,bshd->bhts", {query, key}) / std::sqrt(query.size(3));
  const at::Tensor weights =
      scores.masked_fill(future(query.size(1)), -std::numeric_limits<double>::infinity())
          .softmax(-1);
  return torch::einsum("bhts,bshd->bthd", {weights, value});
}

// Batch and heads are one dimension.
at::Tensor by_batches_of_products(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value) {
  const int64_t batch = query.size(0), tokens = query.size(1), heads = query.size(2);
  const auto together = [&](const at::Tensor& each) {
    return each.transpose(1, 2).reshape({batch * heads, tokens, -1});
  };
  const at::Tensor scores = torch::bmm(together(query), together(key).transpose(1, 2));
  const at::Tensor slopes = torch::where(future(tokens), -1e9, 0.0).to(torch::kFloat64);
  const at::Tensor weights = (scores / std::sqrt(query.size(3)) + slopes).softmax(-1);
  return torch::bmm(weights, together(value)).view({batch, heads, tokens, -1}).transpose(1, 2);
}

at::Tensor fused(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const at::Tensor& mask) {
  return torch::scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2),
                                             value.transpose(1, 2), mask)
      .transpose(1, 2);
}

at::Tensor with_added_mask(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value) {
  return fused(query, key, value,
               torch::where(future(query.size(1)), -1e9, 0.0).to(torch::kFloat64));
}

// The first text of the batch ends earlier.
at::Tensor with_padding(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  auto mask = torch::ones({query.size(0), 1, 1, key.size(1)}, torch::kBool);
  mask[0].slice(-1, 3) = false;
  return fused(query, key, value, mask);
}

struct OwnAttentionImpl : torch::nn::Module {
  Linear query = register_module("query", Linear(kOwnWidth, kOwnWidth));
  // Without a bias: softmax would take it out again, and its gradient be rounding.
  Linear key =
      register_module("key", Linear(torch::nn::LinearOptions(kOwnWidth, kOwnWidth).bias(false)));
  Linear value = register_module("value", Linear(kOwnWidth, kOwnWidth));
  Linear output = register_module("output", Linear(kOwnWidth, kOwnWidth));
  Attend attend;

  explicit OwnAttentionImpl(Attend how) : attend(std::move(how)) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](Linear& projection) {
      return projection->forward(x).view({x.size(0), x.size(1), kOwnHeads, -1});
    };
    return output->forward(attend(heads(query), heads(key), heads(value)).reshape(x.sizes()));
  }
};
TORCH_MODULE(OwnAttention);

class OwnAttentionInParallel : public Worlds {
 protected:
  void expect_one_device(const Attend& attend) const {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto make = [&] { return OwnAttention(attend); };
      auto plain = drawn(1, make), parallel = drawn(1, make);
      const ColwiseParallel heads{.unit = kOwnHeadWidth};
      parallelize_module(parallel, mesh,
                         {{"query", heads},
                          {"key", heads},
                          {"value", heads},
                          {"output", RowwiseParallel{.unit = kOwnHeadWidth}}});
      const at::Tensor x = drawn_tensor(2, {2, 6, kOwnWidth});
      const at::Tensor wanted = plain->forward(x);
      const RedistributionPolicy policy(Redistribution::kExplicit);
      const at::Tensor found = parallel->forward(x);
      EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
      wanted.square().sum().backward();
      found.square().sum().backward();
      expect_same_gradients(*parallel, *plain, kClose);
    });
  }
};

TEST_P(OwnAttentionInParallel, ByEinsum) { expect_one_device(by_einsum); }
TEST_P(OwnAttentionInParallel, ByBatchesOfProducts) { expect_one_device(by_batches_of_products); }
TEST_P(OwnAttentionInParallel, WithAnAddedMask) { expect_one_device(with_added_mask); }
TEST_P(OwnAttentionInParallel, WithPadding) { expect_one_device(with_padding); }

INSTANTIATE_WORLDS(OwnAttentionInParallel, 1, 2, 3);

// Every expert has tokens of its own.
struct OwnExpertsImpl : torch::nn::Module {
  at::Tensor up = register_parameter("up", torch::randn({5, 4, 6}));
  at::Tensor down = register_parameter("down", torch::randn({5, 6, 4}));

  at::Tensor forward(const at::Tensor& x) {
    return torch::bmm(torch::gelu(torch::bmm(x, up)), down).mean(0);
  }
};
TORCH_MODULE(OwnExperts);

class ExpertsInParallel : public Worlds {};

TEST_P(ExpertsInParallel, OfOneTensorAreThoseOfOneDeviceWithoutAStyle) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return OwnExperts(); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"*", ShardParameter{Shard{0}}}});
    const at::Tensor x = drawn_tensor(2, {5, 3, 4});
    CommunicationLog log;
    const at::Tensor found = parallel->forward(x), wanted = plain->forward(x);
    EXPECT_TRUE(log.entries().empty()) << log.text();
    EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

INSTANTIATE_WORLDS(ExpertsInParallel, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
