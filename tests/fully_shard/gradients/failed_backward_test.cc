// What an exception in a backward leaves: of the units that took part nothing, of the
// others all.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class AbortedBackward : public Worlds {};

int64_t bytes_below(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += 4 * parameter.numel();
  return bytes;
}

// A loss whose backward throws when it comes to the output of block 0.
torch::Tensor failing_loss(MeasuredDecoder& decoder) {
  auto& model = *decoder.model;
  auto x = model.blocks[0](model.embedding(make_data(5).index));
  x.register_hook([](const torch::Tensor&) { throw std::runtime_error("in backward"); });
  for (size_t i = 1; i < model.blocks.size(); ++i) x = model.blocks[i](x);
  return model.head(model.norm(x)).pow(2).mean();
}

torch::Tensor head_loss(MeasuredDecoder& decoder) {
  return decoder.model->head(torch::ones({1, MeasuredDecoder::kWidth})).sum();
}

torch::Tensor head_gradient(MeasuredDecoder& decoder) {
  return full_gradient(decoder.model->head->parameters()[0]);
}

TEST_P(AbortedBackward, DropsTheWaitingGradientsOfUnitsThatTookPartOnly) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    const auto untouched =
        bytes_below(*decoder.model->embedding) + bytes_below(*decoder.model->blocks[0]);
    const NoSyncGuard guard(decoder.root());
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(counters(mesh).gradient_bytes, bytes_below(*decoder.model));
    EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    EXPECT_EQ(counters(mesh).gradient_bytes, untouched);
  });
}

TEST_P(AbortedBackward, LeavesNothingToBeReducedByTheNext) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    const auto next = traffic_of(mesh, [&] { head_loss(decoder).backward(); });
    EXPECT_EQ(next.reduce_scatters, 1);
  });
}

// The embedding and block 0 took no part in it, and have gradients from before.
TEST_P(AbortedBackward, LeavesWaitingGradientsToBeReducedByTheNext) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    const auto weight = decoder.model->embedding->parameters()[0];
    decoder.forward();
    decoder.backward();
    const auto expected = full_gradient(weight);
    decoder.model->zero_grad();
    {
      const NoSyncGuard guard(decoder.root());
      decoder.forward();
      decoder.backward();
    }
    EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    const auto next = traffic_of(mesh, [&] { head_loss(decoder).backward(); });
    EXPECT_EQ(next.reduce_scatters, 3);
    EXPECT_TRUE(torch::equal(full_gradient(weight), expected));
  });
}

TEST_P(AbortedBackward, TeachesNoSuccessors) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.step();
    decoder.forward();
    EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    const auto backward = decoder.backward();      // of the graph that was made before
    EXPECT_EQ(backward.all_gathers, kBlocks + 2);  // the head, the root and the blocks
    EXPECT_EQ(backward.prefetched, kBlocks);       // as in every step
    EXPECT_EQ(backward.unused, 0);
  });
}

INSTANTIATE_WORLDS(AbortedBackward, 2, 3);

// The same where nothing is reduced, since there is one rank.
class BackwardThatThrows : public Worlds {};

TEST_P(BackwardThatThrows, AddsToNoGradient) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    const auto gradients_of_a_step = [&] {
      decoder.forward();
      decoder.backward();
      std::vector<torch::Tensor> gradients;
      for (const auto& each : decoder.model->parameters()) gradients.push_back(full_gradient(each));
      return gradients;
    };
    const auto expected = gradients_of_a_step();
    decoder.model->zero_grad();
    for (int i = 0; i < 3; ++i) EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    for (const auto& each : decoder.model->parameters()) EXPECT_FALSE(each.grad().defined());
    const auto gradients = gradients_of_a_step();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(gradients[i], expected[i])) << i;
  });
}

TEST_P(BackwardThatThrows, DropsWhatEarlierBackwardsHeldBack) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    head_loss(decoder).backward();
    const auto one = head_gradient(decoder);
    decoder.model->zero_grad();

    decoder.root().set_is_last_backward(false);
    head_loss(decoder).backward();
    EXPECT_THROW(failing_loss(decoder).backward(), std::exception);
    EXPECT_FALSE(decoder.model->head->parameters()[0].grad().defined());
    decoder.root().set_is_last_backward(true);
    head_loss(decoder).backward();
    EXPECT_TRUE(torch::equal(head_gradient(decoder), one));
  });
}

INSTANTIATE_WORLDS(BackwardThatThrows, 1, 2, 3);

// Two suspicions about the end of a backward: that nobody cleans up when it fails, and
// that a unit which dies in its middle lets the last reduction leave too early.
class InterruptedBackward : public Worlds {};

struct SparseAndDense : torch::nn::Module {
  torch::nn::Embedding rows =
      register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).sparse(true)));
  torch::nn::Linear dense =
      register_module("dense", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
};

std::shared_ptr<SparseAndDense> sparse_and_dense(const DeviceMesh& mesh) {
  auto model = std::make_shared<SparseAndDense>();
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(0.5);
  }
  fully_shard(model->rows, mesh);
  fully_shard(model->dense, mesh);
  fully_shard(model, mesh);
  return model;
}

TEST_P(InterruptedBackward, ThatFailsAtItsEndIsFollowedByACleanOne) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear witness(2, 2);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : witness->parameters()) parameter.fill_(0.5);
    }
    fully_shard(witness, mesh);
    const auto before = counters(mesh).sharded_bytes;
    {
      const auto model = sparse_and_dense(mesh);
      const auto x = torch::full({1, 4}, 1.0 + static_cast<double>(rank));
      // The sparse gradient of a backward without synchronisation is met by the end of
      // the next one, which does not touch its unit.
      EXPECT_THAT(message_of([&] {
                    {
                      NoSyncGuard no_sync(get_fsdp_module(*model));
                      model->rows(torch::tensor({1, 2})).sum().backward();
                    }
                    model->dense(10 * x).sum().backward();
                  }),
                  HasSubstr("rows.weight"));
      model->zero_grad();
      get_fsdp_module(*model).set_requires_gradient_sync(true);
      get_fsdp_module(*model).zero_pending_gradients();
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      EXPECT_EQ(counters(mesh).staging_bytes, 0);
      const auto mean = static_cast<double>(mesh.size() + 1) / 2;
      for (int backward = 1; backward <= 2; ++backward) {
        model->dense(x).sum().backward();
        EXPECT_TRUE(torch::allclose(full_gradient(model->dense->parameters()[0]),
                                    torch::full({4, 4}, backward * mean)))
            << full_gradient(model->dense->parameters()[0]);
      }
    }
    EXPECT_EQ(counters(mesh).sharded_bytes, before);  // nothing of it holds the model
  });
}

// The identity, whose backward runs `last`, the last thing that happens in a backward.
struct AtTheEnd : torch::autograd::Function<AtTheEnd> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x,
                               std::function<void()> last) {
    pending() = std::move(last);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    torch::AutoGradMode grad_mode(true);
    pending()();
    return {gradients[0], {}};
  }
  static std::function<void()>& pending() {
    thread_local std::function<void()> last;
    return last;
  }
};

torch::nn::Linear sharded_constant_layer(const DeviceMesh& mesh) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
  {
    torch::NoGradGuard no_grad;
    layer->weight.fill_(0.5);
  }
  fully_shard(layer, mesh);
  return layer;
}

TEST_P(InterruptedBackward, InWhichAUnitDiesStillBringsLateGradients) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto first = sharded_constant_layer(mesh), second = sharded_constant_layer(mesh);
    const auto run = [&](bool dies, bool late) {
      for (auto* layer : {&first, &second}) (*layer)->parameters()[0].mutable_grad().reset();
      auto doomed = sharded_constant_layer(mesh);
      const auto x = torch::ones({1, 4}, torch::requires_grad());
      const auto input = AtTheEnd::apply(x, [&] {
        if (dies) doomed = nullptr;
        const auto once_more = first->weight.sum(), at_last = (3 * second->weight).sum();
        once_more.backward();  // the last reduction waits for it
        if (late && rank == 0) at_last.backward();
      });
      const auto loss = second(first(input)).sum();
      {
        const auto unused = doomed(torch::ones({1, 4}));  // stands first in backward's order
      }
      loss.backward();
      return std::make_pair(full_gradient(first->parameters()[0]),
                            full_gradient(second->parameters()[0]));
    };
    const auto usual = run(false, false);
    for (const bool dies : {false, true}) {
      const auto gradients = run(dies, true);
      EXPECT_TRUE(torch::allclose(gradients.first, usual.first)) << dies;
      EXPECT_TRUE(
          torch::allclose(gradients.second, usual.second + 3.0 / static_cast<double>(world())))
          << dies << gradients.second << usual.second;
    }
    const auto again = run(true, false);
    EXPECT_TRUE(torch::equal(again.first, usual.first));
    EXPECT_TRUE(torch::equal(again.second, usual.second));
  });
}

INSTANTIATE_WORLDS(InterruptedBackward, 2, 3);

}  // namespace
}  // namespace fsdp::testing
