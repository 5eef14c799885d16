// What a fully_shard call takes is closed: what could be meant in two ways does not
// compile.
#include "fully_shard/fully_shard.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <type_traits>

namespace fsdp::testing {
namespace {

template <class From>
constexpr bool kIsAPolicy = std::is_constructible_v<ReshardAfterForward, From>;

static_assert(kIsAPolicy<bool> && std::is_convertible_v<bool, ReshardAfterForward>);
// Numbers convert, to an error that names to_world(n) (tests/install_test.sh).
static_assert(!kIsAPolicy<double> && !kIsAPolicy<float>);
static_assert(!kIsAPolicy<const char*> && !kIsAPolicy<std::string> && !kIsAPolicy<std::nullptr_t>);
static_assert(!kIsAPolicy<std::optional<bool>>);
static_assert(!std::is_default_constructible_v<ReshardAfterForward>, "unset is an empty optional");

template <class... Arguments>
concept ShardsWith = requires(Arguments... arguments) {
  fully_shard(arguments...);
};

using torch::nn::Linear;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

static_assert(ShardsWith<Linear> && ShardsWith<Linear, DeviceMesh>);
static_assert(ShardsWith<Linear, DeviceMesh, FullyShardOptions>);
static_assert(ShardsWith<std::shared_ptr<torch::nn::LinearImpl>, DeviceMesh>);
static_assert(ShardsWith<std::vector<torch::nn::Module*>, DeviceMesh>);
// A process group is made into a mesh, DeviceMesh::from_group; there is no giving both.
static_assert(!ShardsWith<Linear, Group> && !ShardsWith<Linear, DeviceMesh, Group>);
static_assert(!ShardsWith<Linear, Group, DeviceMesh>);

TEST(ReshardAfterForward, TellsWhatItWasMadeOf) {
  EXPECT_TRUE(ReshardAfterForward(true).reshards());
  EXPECT_FALSE(ReshardAfterForward(false).reshards());
  EXPECT_EQ(ReshardAfterForward(true).world(), std::nullopt);
  EXPECT_TRUE(ReshardAfterForward::to_world(2).reshards());
  EXPECT_EQ(ReshardAfterForward::to_world(2).world(), 2);
  EXPECT_FALSE(FullyShardOptions().reshard_after_forward.has_value());
}

}  // namespace
}  // namespace fsdp::testing
