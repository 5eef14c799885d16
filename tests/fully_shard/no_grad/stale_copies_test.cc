// What a write to a registry entry does to the unsharded copy, to versions and to graphs.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class StaleCopies : public Worlds {};

torch::nn::Linear sharded_square(const DeviceMesh& mesh) {
  auto layer = make_linear(4, 4);
  fully_shard(layer, mesh);
  return layer;
}

TEST_P(StaleCopies, AreEmptyAtOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    get_fsdp_module(*layer).unshard();
    EXPECT_GT(resident_bytes(counters(mesh)), 0);
    torch::NoGradGuard no_grad;
    layer->parameters()[0].mul_(2);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// The operator that writes the entry reads the member meanwhile, so its memory stays.
TEST_P(StaleCopies, InUseByTheOperatorThatWroteAreGatheredAnewByTheNext) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    torch::NoGradGuard no_grad;
    const auto before = layer->weight.clone();
    layer->parameters()[0].copy_(layer->weight.t());
    const auto traffic =
        traffic_of(mesh, [&] { EXPECT_TRUE(torch::equal(layer->weight + 0, before.t() + 0)); });
    EXPECT_EQ(traffic.all_gathers, 1);
  });
}

TEST_P(StaleCopies, AreToldByTheVersionsOfBothHandles) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    auto entry = layer->parameters()[0];
    torch::NoGradGuard no_grad;
    const auto member_version = layer->weight._version();
    entry.mul_(2);
    EXPECT_GT(layer->weight._version(), member_version);
    layer->weight.mul_(2);
    const auto entry_version = entry._version();
    get_fsdp_module(*layer).reshard();
    EXPECT_GT(entry._version(), entry_version);
  });
}

// A graph that reads a weight in backward without having saved it.
torch::Tensor reads_in_backward(const torch::nn::Linear& layer, const torch::Tensor& loss) {
  loss.register_hook([weight = layer->weight](const torch::Tensor& gradient) {
    return gradient * weight.sum().detach();
  });
  return loss;
}

TEST_P(StaleCopies, UnderAGraphThatDidNotSaveThemAreAnErrorInItsBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    const auto loss = reads_in_backward(layer, layer(torch::ones({1, 4})).sum());
    {
      torch::NoGradGuard no_grad;
      layer->parameters()[0].mul_(2);
    }
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("written after the forward")));
  });
}

TEST_P(StaleCopies, OfAGraphThatIsDoneMayBeReadInAnyBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh), other = sharded_square(mesh);
    layer(torch::ones({1, 4})).sum().backward();
    {
      torch::NoGradGuard no_grad;
      layer->parameters()[0].mul_(2);
    }
    EXPECT_NO_THROW(reads_in_backward(layer, other(torch::ones({1, 4})).sum()).backward());
  });
}

INSTANTIATE_WORLDS(StaleCopies, 2, 3);

}  // namespace
}  // namespace fsdp::testing
