// What an exception in a backward leaves: of the units that took part nothing, of the
// others all.
#include "tests/fully_shard/effects/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fsdp::testing {
namespace {

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

TEST_P(AbortedBackward, DropsWhatEarlierBackwardsHeldBack) {
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

}  // namespace
}  // namespace fsdp::testing
