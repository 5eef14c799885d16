// Buffers that are cast for computing are saved, and loaded, in the dtype they had
// before.
#include "checkpoint/checkpoint.h"
#include "checkpoint/inspect.h"
#include "checkpoint/state_dict.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace fsdp::testing {
namespace {

using ::testing::ContainsRegex;

const std::string kMean = "norm.running_mean";

SmallModel cast_model(int64_t world) {
  SmallModel model;
  fully_shard(model, init_device_mesh(torch::kCPU, {world}),
              {.mp_policy = {.buffer_dtype = at::kBFloat16}});
  fill(*model, 1);
  return model;
}

TEST(BufferDtypeInDicts, IsTheirOwn) {
  run_ranks(2, [](int64_t) {
    auto model = cast_model(2);
    const auto mean = model->norm->running_mean;
    for (const auto& options : {StateDictOptions{}, StateDictOptions{.full_state_dict = true},
                                StateDictOptions{.local = true}}) {
      const auto values = get_model_state_dict(*model, options);
      EXPECT_EQ(values[kMean].scalar_type(), at::kFloat);
      EXPECT_TRUE(values[kMean].equal(mean.to(at::kFloat)));
      set_model_state_dict(*model, values, options);
      EXPECT_EQ(mean.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(values[kMean].equal(mean.to(at::kFloat)));
    }
  });
}

TEST(BufferDtypeInFiles, IsTheirOwnAndAnyModelTakesThem) {
  const TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    auto model = cast_model(2);
    const auto saved = model->norm->running_mean.to(at::kFloat);
    save({.model = model}, folder / "step");
    EXPECT_THAT(describe_checkpoint(folder / "step"), ContainsRegex(kMean + " +F32 "));
    fill(*model, 2);
    load({.model = model}, folder / "step");
    EXPECT_TRUE(model->norm->running_mean.to(at::kFloat).equal(saved));
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kBFloat16);
    SmallModel plain;
    load({.model = plain}, folder / "step");
    EXPECT_TRUE(plain->norm->running_mean.equal(saved));
  });
}

}  // namespace
}  // namespace fsdp::testing
