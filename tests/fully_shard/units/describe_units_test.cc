// What describe_units() says of every unit.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class DescribeUnits : public Worlds {};

std::string line_of(torch::nn::Module& model, const std::string& unit) {
  const auto text = describe_units(model);
  const auto begin = text.find(unit + ": ");
  EXPECT_NE(begin, std::string::npos) << text;
  return text.substr(begin, text.find('\n', begin) - begin);
}

TEST_P(DescribeUnits, SaysWhereEachStands) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");  // else nothing is gathered
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh, {.reshard_after_forward = false});
    EXPECT_THAT(line_of(*model, "first"),
                AllOf(HasSubstr("first: sharded, 2 parameters"), HasSubstr("last: none"),
                      Not(HasSubstr("reshards after forward"))));
    EXPECT_THAT(line_of(*model, "(root)"), HasSubstr("no parameters of its own"));
    auto first = get_fsdp_module(*model->first);
    first.unshard();
    EXPECT_THAT(line_of(*model, "first"), AllOf(HasSubstr("first: unsharded, 2 parameters"),
                                                HasSubstr("last: all-gather 2")));
    {
      const SummonFullParams full(first);
      EXPECT_THAT(line_of(*model, "first"), HasSubstr("unsharded and held"));
    }
    EXPECT_THAT(line_of(*model, "second"), HasSubstr("last: none"));
    {
      const NoSyncGuard no_sync(get_fsdp_module(*model));
      model->forward(torch::ones({2, 4})).sum().backward();
    }
    EXPECT_THAT(line_of(*model, "second"), HasSubstr("gradients waiting"));
    EXPECT_THAT(describe_units(*model), AllOf(HasSubstr("collectives issued last by rank " +
                                                        std::to_string(rank) + " among ranks 0, 1"),
                                              HasSubstr("2: all-gather of unit 'first', ")));
  });
}

// At most 64 in a line each, below their heading.
TEST_P(DescribeUnits, ListsTheLastCollectivesOnly) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh, {});
    const auto lines = [&] {
      const auto text = describe_units(*model);
      return std::count(text.begin() + static_cast<int64_t>(text.find("issued last by")),
                        text.end(), '\n');
    };
    auto first = get_fsdp_module(*model->first);
    first.unshard();
    EXPECT_LT(lines(), 10);
    for (int i = 0; i < 80; ++i) {
      first.reshard();
      first.unshard();
    }
    EXPECT_EQ(lines(), 1 + 64);
  });
}

TEST_P(DescribeUnits, CountsBytes) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Pair(4, 6, 3); });
    fully_shard(model, mesh);
    EXPECT_THAT(line_of(*model, "(root)"), HasSubstr("without values, 4 parameters"));
    materialize(*model);
    EXPECT_THAT(line_of(*model, "(root)"),
                HasSubstr(std::to_string(counters(mesh).sharded_bytes) + " bytes of shards"));
    get_fsdp_module(*model).unshard();
    EXPECT_THAT(line_of(*model, "(root)"),
                HasSubstr(std::to_string(resident_bytes(counters(mesh))) + " unsharded"));
  });
}

INSTANTIATE_WORLDS(DescribeUnits, 2, 3);

}  // namespace
}  // namespace fsdp::testing
