// backward(create_graph = true) cannot leave a differentiable .grad on shards, and says
// so.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CreateGraph : public Worlds {};

TEST_P(CreateGraph, InBackwardIsAnErrorThatNamesAParameterAndTheWayOut) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto data = make_data(407 + static_cast<uint64_t>(rank));
    EXPECT_THAT(message_of([&] {
                  sharded.loss(data).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
                }),
                AllOf(HasSubstr("create_graph"), HasSubstr("fsdp::grad"),
                      ::testing::AnyOf(HasSubstr(".weight'"), HasSubstr(".bias'"))));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);

    sharded.module->zero_grad();
    const auto expected = expected_gradients(plain, mesh.size(), 4);
    sharded.loss(data).backward();
    expect_gradients(*sharded.module, expected, mesh.size(), "the step after");
  });
}

TEST_P(CreateGraph, WithoutGradModeNothingIsSaid) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Linear layer(4, 4);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
    }
    fully_shard(layer, mesh);
    const auto loss = layer(torch::ones({1, 4})).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_TRUE(layer->parameters()[0].grad().defined());
  });
}

INSTANTIATE_WORLDS(CreateGraph, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
