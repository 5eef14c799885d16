// A touch of the unit that was touched last is left out, until something changes.
#include "fully_shard/units/unit_events.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class RepeatedTouches : public Worlds {};

// Counts the touches that reached the runtime on this thread.
class TouchLog final : public internal::UnitObserver {
 public:
  int64_t touches = 0;

  void touched(const internal::Unit&, internal::Pass) override { ++touches; }
  void gradient_arrived(const internal::Unit&) override {}
  void unshard_issued(const internal::Unit&) override {}
  void unsharded_explicitly(const internal::Unit&) override {}
  void resharded_explicitly(const internal::Unit&) override {}
  void entry_written(const internal::Unit&) override {}
  void member_written(const internal::Unit&) override {}
  void backward_ended() override {}
  void backward_aborted() override {}

 private:
  internal::ObserveUnits observe_{*this};
};

torch::nn::Linear sharded_layer(const DeviceMesh& mesh) {
  auto layer = make_linear(4, 4);
  fully_shard(layer, mesh);
  return layer;
}

TEST_P(RepeatedTouches, AreLeftOutInEveryPass) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_layer(mesh), other = sharded_layer(mesh);
    const auto x = torch::ones({1, 4}, torch::requires_grad());
    const TouchLog log;
    for (int i = 0; i < 5; ++i) layer(x);
    EXPECT_EQ(log.touches, 1);
    {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 5; ++i) layer(x);
      EXPECT_EQ(log.touches, 2) << "another pass";
      other(x);
      layer(x);
      EXPECT_EQ(log.touches, 4) << "another unit in between";
    }
  });
}

TEST_P(RepeatedTouches, AreNotLeftOutAfterAnExplicitReshard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_layer(mesh);
    const auto x = torch::ones({1, 4});
    torch::NoGradGuard no_grad;
    const auto expected = layer(x);
    get_fsdp_module(*layer).reshard();
    const auto again = traffic_of(mesh, [&] { EXPECT_TRUE(torch::equal(layer(x), expected)); });
    EXPECT_EQ(again.all_gathers, 1);
  });
}

TEST_P(RepeatedTouches, AreNotLeftOutAfterAnExplicitUnshard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& blocks = decoder.model->blocks;
    torch::NoGradGuard no_grad;
    const auto x = torch::ones({1, MeasuredDecoder::kWidth});
    blocks[0](x);
    decoder.block(0).unshard();  // waits for its turn, which is the next touch
    blocks[0](x);
    const auto one_block = decoder.resident_bytes();
    blocks[2](x);
    EXPECT_EQ(decoder.resident_bytes(), one_block);
  });
}

TEST_P(RepeatedTouches, OfABackwardEndWithIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
    fully_shard(layer, mesh);
    auto unit = get_fsdp_module(*layer);
    const auto loss = layer(torch::ones({1, 4}, torch::requires_grad())).sum();
    unit.set_is_last_backward(false);
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_GT(resident_bytes(counters(mesh)), 0);
    unit.set_is_last_backward(true);
    loss.backward();  // its only touch is of the same kind, and of the same unit
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

INSTANTIATE_WORLDS(RepeatedTouches, 2, 3);

}  // namespace
}  // namespace fsdp::testing
