#include "device_mesh/on_mesh/claims.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace fsdp::internal {
namespace {

using fsdp::testing::message_of;
using fsdp::testing::on_ranks_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ClaimsOfRanks : public fsdp::testing::Worlds {
 protected:
  bool is_last(int64_t rank) const { return rank == world() - 1; }
};

TEST_P(ClaimsOfRanks, AreComparedByTopicAndNameTheFirstLineThatDiffers) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Claims alike("call"), other("call");
    alike.add("size", "3");
    EXPECT_NO_THROW(alike.check(mesh, "give the same"));
    other.add("size", "3");
    other.add("names", is_last(rank) ? "a\nb\nd" : "a\nb\nc");
    const auto last = std::to_string(world() - 1);
    EXPECT_EQ(message_of<c10::ValueError>([&] { other.check(mesh, "give the same"); }),
              "call: the ranks differ in names: rank 0 has c where rank " + last +
                  " has d; give the same (rank " + std::to_string(rank) + ")");
    EXPECT_NO_THROW(alike.check(mesh, "give the same")) << "the group goes on";
  });
}

TEST_P(ClaimsOfRanks, OfTopicsThatOtherRanksDoNotHaveAreTheirOwn) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Claims claims("call");
    claims.add("size", "3");
    claims.add("on mesh " + std::to_string(rank), std::to_string(rank));
    EXPECT_NO_THROW(claims.check(mesh, ""));
  });
}

// A text is asked for only where ranks differ, of the topic in which they do.
TEST_P(ClaimsOfRanks, GiveTheirTextOnDemand) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    int asked_alike = 0, asked_other = 0;
    Claims claims("call");
    claims.add("alike", 7, [&] { return std::to_string(++asked_alike); });
    claims.check(mesh, "");
    claims.add("other", static_cast<uint64_t>(rank), [&] {
      ++asked_other;
      return "of " + std::to_string(rank);
    });
    EXPECT_THAT(message_of<c10::ValueError>([&] { claims.check(mesh, ""); }),
                HasSubstr("rank 0 has of 0 where rank 1 has of 1"));
    EXPECT_EQ(asked_alike, 0);
    EXPECT_EQ(asked_other, 1);
  });
}

TEST_P(ClaimsOfRanks, OneThatRefusesIsHeardOnAll) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Claims claims("call");
    is_last(rank) ? claims.refuse("can not:\nof two lines") : claims.add("size", "3");
    EXPECT_EQ(message_of<c10::ValueError>([&] { claims.check(mesh, ""); }),
              "can not:\nof two lines");
  });
}

TEST_P(ClaimsOfRanks, TravelWithTheNumbersOfACall) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Claims claims("call");
    claims.add("size", std::to_string(is_last(rank) ? 4 : 3));
    const auto numbers = at::full({2}, static_cast<double>(rank), at::kDouble);
    const auto rows = rows_of_all(
        collectives_of(mesh),
        {.row = at::cat({numbers, claims.words().view(at::kDouble)}), .what = "a call's numbers"});
    EXPECT_EQ(rows[world() - 1][0].item<double>(), static_cast<double>(world() - 1));
    EXPECT_THAT(
        message_of<c10::ValueError>(
            [&] { claims.check_words(rows.slice(1, 2).contiguous().view(at::kLong), mesh, ""); }),
        AllOf(StartsWith("call: the ranks differ in size: rank 0 has 3"), HasSubstr("has 4")));
  });
}

TEST_P(ClaimsOfRanks, OfNumbersAreExact) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Claims zeros("call"), near("call");
    zeros.add("zero", is_last(rank) ? -0.0 : 0.0);
    EXPECT_NO_THROW(zeros.check(mesh, ""));
    near.add("number", is_last(rank) ? 1048577.0 : 1048576.0);
    EXPECT_THAT(message_of<c10::ValueError>([&] { near.check(mesh, ""); }),
                AllOf(HasSubstr("rank 0 has 1048576 where"), HasSubstr("has 1048577;")));
  });
}

INSTANTIATE_WORLDS(ClaimsOfRanks, 2, 3);

TEST(Claims, OfOneRankAreAlike) {
  on_ranks_of(1, [](const DeviceMesh& mesh) {
    Claims claims("call");
    for (int i = 0; i < 2 * Claims::kTopics; ++i) claims.add(std::to_string(i), "one");
    EXPECT_NO_THROW(claims.check(mesh, ""));
  });
}

}  // namespace
}  // namespace fsdp::internal
