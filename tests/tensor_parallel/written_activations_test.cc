// Activations that a model writes in place, through views, one element at a time, across
// the cut or as a whole: losses and gradients are those of one device.
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <functional>
#include <limits>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::indexing::Slice;
using torch::nn::Linear;

struct TwoLinearImpl : torch::nn::Module {
  Linear up = register_module("up", Linear(6, 8));
  Linear down = register_module("down", Linear(8, 6));
};
TORCH_MODULE(TwoLinear);

// From the cut result of `up`, [2, 5, 8], what `down` reads.
using Between = std::function<at::Tensor(const at::Tensor&)>;

class WrittenActivations : public Worlds {
 protected:
  void expect_one_device(const Between& between) const {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto make = [] { return TwoLinear(); };
      auto plain = drawn(1, make), parallel = drawn(1, make);
      parallelize_module(parallel, mesh, {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
      const at::Tensor x = drawn_tensor(2, {2, 5, 6});
      const auto forward = [&](TwoLinear& model) {
        return model->down->forward(between(model->up->forward(x)));
      };
      const at::Tensor wanted = forward(plain), found = forward(parallel);
      EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
      wanted.square().mean().backward();
      full_tensor(found).square().mean().backward();
      expect_same_gradients(*parallel, *plain, kClose);
    });
  }
  // `write` changes its argument.
  void expect_written(const std::function<void(const at::Tensor&)>& write) const {
    expect_one_device([&](const at::Tensor& y) {
      write(y);
      return y;
    });
  }
};

TEST_P(WrittenActivations, ThroughViewsThatKeepTheCut) {
  expect_written([](const auto& y) { y.select(1, 0).zero_(); });
  expect_written([](const auto& y) { y.slice(1, 1, 3).mul_(0.5); });
  expect_written([](at::Tensor y) { y.index_put_({Slice(), 0}, torch::ones({8}, y.options())); });
  expect_written([](const auto& y) { y.index({0, 1}).tanh_(); });
  expect_written([](const auto& y) { y.view({10, 8}).narrow(0, 2, 3).sigmoid_(); });
  expect_written([](const auto& y) { y.transpose(1, 2).select(2, 1).add_(1); });
  expect_written([](const auto& y) { y[1].copy_(y[0].detach()); });
}

TEST_P(WrittenActivations, ThroughViewsAcrossTheCut) {
  expect_written([](const auto& y) { y.select(2, 3).zero_(); });
  expect_written([](const auto& y) { y.slice(2, 1, 4).mul_(0.5); });
  expect_written([](const auto& y) { y.index({"...", Slice(0, 2)}).tanh_(); });
  expect_written([](at::Tensor y) { y.index_put_({0, 0, 5}, 2.0); });
}

TEST_P(WrittenActivations, BuffersThatAreFilledInLoops) {
  expect_one_device([](const at::Tensor& y) {
    const at::Tensor buffer = torch::zeros_like(y);
    for (int64_t t = 0; t < y.size(1); ++t) buffer.select(1, t).copy_(y.select(1, t).tanh());
    return buffer;
  });
  expect_one_device([](const at::Tensor& y) {
    const at::Tensor buffer = torch::zeros_like(y);
    for (int64_t c = 0; c < y.size(2); c += 3)
      buffer.slice(2, c, c + 3).copy_(y.slice(2, c, c + 3).tanh());
    return buffer;
  });
}

// As rms_norm does: mean().add_(eps).
TEST_P(WrittenActivations, NormsOverTheCutDimension) {
  expect_one_device(
      [](const at::Tensor& y) { return torch::rms_norm(y, {8}, /*weight=*/{}, 1e-5); });
  expect_one_device([](const at::Tensor& y) {
    return y * y.pow(2).mean(-1, /*keepdim=*/true).add_(1e-5).rsqrt_();
  });
}

INSTANTIATE_WORLDS(WrittenActivations, 1, 2, 3);

class WrittenParallel : public Worlds {};

TEST_P(WrittenParallel, LossesTakeNumbersInPlace) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return Linear(6, 8); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"", ColwiseParallel{}}});
    const at::Tensor x = drawn_tensor(2, {4, 6});
    const auto loss_of = [&](Linear& model) {
      at::Tensor loss = model->forward(x).square().mean();
      loss += 1.;
      loss *= 2.;
      return loss;
    };
    const at::Tensor wanted = loss_of(plain), found = loss_of(parallel);
    EXPECT_NEAR(found.item<double>(), wanted.item<double>(), kClose);
    wanted.backward();
    found.backward();
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

// Without styles the numbers are the same: an in-place activation meets terms of a sum.
TEST_P(WrittenParallel, ActivationsInPlaceAfterAShardedParameter) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] {
      return torch::nn::Sequential(
          Linear(6, 8), torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)), Linear(8, 6));
    };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"0.weight", ShardParameter{Shard{1}}}});
    const at::Tensor x = drawn_tensor(2, {4, 6});
    const at::Tensor wanted = plain->forward(x), found = parallel->forward(x);
    EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

// matmul of a vector squeezes its result in place; RNNs with batch_first transpose it.
TEST_P(WrittenParallel, ShapesChangeInPlace) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return torch::nn::Sequential(Linear(6, 8), Linear(8, 6)); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"0", ColwiseParallel{}}, {"1", RowwiseParallel{}}});
    const at::Tensor x = drawn_tensor(2, {6});
    const at::Tensor wanted = plain->forward(x), found = full_tensor(parallel->forward(x));
    ASSERT_EQ(found.sizes(), wanted.sizes());
    EXPECT_LE(distance(found.detach(), wanted.detach()), kClose);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

template <class Recurrent, class Options>
void expect_recurrent(const DeviceMesh& mesh) {
  const auto make = [] { return Recurrent(Options(6, 4).batch_first(true)); };
  auto plain = drawn(1, make), parallel = drawn(1, make);
  parallelize_module(
      parallel, mesh,
      {{"weight_ih_l0", ShardParameter{Shard{0}}}, {"weight_hh_l0", ReplicateParallel{}}});
  const at::Tensor x = drawn_tensor(2, {3, 5, 6});
  const at::Tensor wanted = std::get<0>(plain->forward(x));
  const at::Tensor found = full_tensor(std::get<0>(parallel->forward(x)));
  EXPECT_LE(distance(found.detach(), wanted.detach()), kClose);
  wanted.square().sum().backward();
  found.square().sum().backward();
  expect_same_gradients(*parallel, *plain, kClose);
}

TEST_P(WrittenParallel, RecurrentModulesWithTheBatchFirst) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    expect_recurrent<torch::nn::GRU, torch::nn::GRUOptions>(mesh);
    expect_recurrent<torch::nn::RNN, torch::nn::RNNOptions>(mesh);
  });
}

// A row of a table whose rows are cut.
TEST_P(WrittenParallel, PaddingRowsOfTables) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] {
      return torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).padding_idx(5));
    };
    auto parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"", RowwiseParallel{}}});
    {
      const torch::NoGradGuard no_grad;
      parallel->weight.fill_(3);
    }
    fsdp::manual_seed(1, mesh);
    parallel->reset_parameters();
    fsdp::use_default_generator();
    const at::Tensor whole = full_value(parallel->weight);
    EXPECT_TRUE(whole[5].equal(torch::zeros({4}, torch::kFloat64)));
    EXPECT_EQ(whole.eq(0).sum().item<int64_t>(), 4);
    EXPECT_EQ(whole.eq(3).sum().item<int64_t>(), 0);
  });
}

TEST_P(WrittenParallel, TokensThatAreBanned) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return Linear(6, 7); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"", ColwiseParallel{}}});
    const torch::NoGradGuard no_grad;
    const at::Tensor x = drawn_tensor(2, {4, 6});
    const auto banned = [&](Linear& model) {
      at::Tensor logits = model->forward(x);
      for (int64_t token : {0, 3, 6})
        logits.select(-1, token).fill_(-std::numeric_limits<double>::infinity());
      logits.index_put_({"...", 2}, -1e30);
      return full_tensor(logits.softmax(-1));
    };
    EXPECT_LE(distance(banned(parallel), banned(plain)), kClose);
  });
}

INSTANTIATE_WORLDS(WrittenParallel, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
