// Inside SummonFullParams a forward has the right numbers, and backward is an error.
#include "tests/fully_shard/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class SummonedBackward : public Worlds {};

TEST_P(SummonedBackward, IsAnErrorWhileTheForwardIsRight) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto data = make_data(407 + static_cast<uint64_t>(rank));
    {
      SummonFullParams full(*sharded.module);
      const auto loss = sharded.loss(data);
      EXPECT_TRUE(torch::equal(loss.detach(), plain.loss(data).detach()));
      EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("SummonFullParams"));
    }
    EXPECT_EQ(counters(mesh).unsharded_bytes, 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    sharded.module->zero_grad();
    const auto expected = expected_gradients(plain, mesh.size(), 4);
    sharded.loss(data).backward();
    expect_gradients(*sharded.module, expected, mesh.size(), "after the summon");
  });
}

INSTANTIATE_WORLDS(SummonedBackward, 2, 3);

}  // namespace
}  // namespace fsdp::testing
