// DebugOptions::order_changes: a rank hears of it when its own order of units changes.
#include "device_mesh/debug.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/warnings.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OrderChanges : public Worlds {
 protected:
  ~OrderChanges() override { set_debug_options({}); }
};

void step_in_order(MeasuredDecoder& decoder, const std::vector<size_t>& blocks) {
  auto& model = *decoder.model;
  auto x = model.embedding(make_data(5).index);
  for (const auto block : blocks) x = model.blocks[block](x);
  model.head(model.norm(x)).sum().backward();
  decoder.update();
}

TEST_P(OrderChanges, AreToldOnceOfEachRootWhereAskedFor) {
  set_debug_options({.order_changes = true});
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    Warnings warnings;
    for (int i = 0; i < 3; ++i) step_in_order(decoder, {0, 1, 2, 3});
    EXPECT_THAT(warnings.texts(), IsEmpty());
    step_in_order(decoder, {1, 0, 2, 3});
    const auto change = AllOf(
        HasSubstr("unit 'embedding' was followed by 'block0' the time before and by 'block1' now"),
        HasSubstr("rank " + std::to_string(rank)));
    EXPECT_THAT(warnings.texts(), ElementsAre(change));
    step_in_order(decoder, {0, 1, 2, 3});
    EXPECT_THAT(warnings.texts(), ElementsAre(change));

    MeasuredDecoder other(mesh);
    step_in_order(other, {0, 1, 2, 3});
    step_in_order(other, {0, 1, 2, 0});
    EXPECT_THAT(warnings.texts(),
                ElementsAre(change, HasSubstr("unit 'block2' was followed by 'block3' the time "
                                              "before and by 'block0' now")));
  });
}

TEST_P(OrderChanges, AreNotThatForwardsRunBeforeTheBackwards) {
  set_debug_options({.order_changes = true});
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    Warnings warnings;
    for (int i = 0; i < 2; ++i) {
      auto& model = *decoder.model;
      const auto forward = [&model] {
        auto x = model.embedding(make_data(5).index);
        for (auto& block : model.blocks) x = block(x);
        return model.head(model.norm(x)).sum();
      };
      const at::Tensor first = forward(), second = forward();
      first.backward();
      second.backward();
      decoder.update();
    }
    EXPECT_THAT(warnings.texts(), IsEmpty());
  });
}

TEST_P(OrderChanges, AreNoConcernWhereNobodyAsked) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    Warnings warnings;
    step_in_order(decoder, {0, 1, 2, 3});
    step_in_order(decoder, {3, 2, 1, 0});
    EXPECT_THAT(warnings.texts(), IsEmpty());
  });
}

INSTANTIATE_WORLDS(OrderChanges, 2, 3);

}  // namespace
}  // namespace fsdp::testing
