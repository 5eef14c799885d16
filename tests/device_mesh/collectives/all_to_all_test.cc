// An all-to-all of sizes that differ from pair to pair, over both transports.
#include "device_mesh/collectives/operations.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "tests/support/errors.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using testing::expect_error;
using ::testing::HasSubstr;

// Bytes that rank `from` sends to `to` in `round`: none from some.
int64_t size_of(int64_t from, int64_t to, int64_t round) {
  return (from * 5 + to * 3 + round) % 4 == 0 ? 0 : 1000 * (from + 1) + 10 * to + round;
}

at::Tensor part_of(int64_t from, int64_t to, int64_t round) {
  return at::full({size_of(from, to, round)}, 16 * from + 4 * to + round % 4, at::kByte);
}

AllToAllOptions options_of(int64_t rank, int64_t world, int64_t round) {
  AllToAllOptions options{.what = "all-to-all " + std::to_string(round)};
  std::vector<at::Tensor> parts;
  for (int64_t peer = 0; peer < world; ++peer) {
    parts.push_back(part_of(rank, peer, round));
    options.input_split_sizes.push_back(size_of(rank, peer, round));
    options.output_split_sizes.push_back(size_of(peer, rank, round));
  }
  options.input = at::cat(parts);
  return options;
}

void expect_received(const std::vector<at::Tensor>& received, int64_t rank, int64_t round) {
  for (size_t peer = 0; peer < received.size(); ++peer)
    EXPECT_TRUE(at::equal(received[peer], part_of(static_cast<int64_t>(peer), rank, round)))
        << "from rank " << peer << " in round " << round;
}

class AllToAllOver : public ::testing::TestWithParam<const char*> {
 protected:
  const testing::WithEnvironment transport_{"FSDP_PEER_MEMORY", GetParam()};
};

TEST_P(AllToAllOver, BringsWhatEveryRankSent) {
  for (const int64_t world : {1, 2, 3, 4}) {
    testing::on_ranks_of(world, [&](int64_t rank, const DeviceMesh& mesh) {
      const auto collectives = collectives_of(mesh, 0);
      for (int64_t round = 0; round < 6; ++round)
        expect_received(collectives.start(options_of(rank, world, round)).wait(), rank, round);
    });
  }
}

TEST_P(AllToAllOver, SeveralMayBeInFlight) {
  testing::on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    const auto collectives = collectives_of(mesh, 0);
    auto first = collectives.start(options_of(rank, 3, 0));
    auto second = collectives.start(options_of(rank, 3, 1));
    { const auto dropped = collectives.start(options_of(rank, 3, 2)); }
    expect_received(second.wait(), rank, 1);
    expect_received(first.wait(), rank, 0);
  });
}

TEST_P(AllToAllOver, OfDifferentNamesIsAnErrorThatNamesBoth) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto options = options_of(rank, 2, 1);
    options.what = rank == 0 ? "all-to-all of rows" : "all-to-all of columns";
    expect_error<c10::Error>(
        [&] { collectives_of(mesh, 0).start(options).wait(); },
        AllOf(HasSubstr("all-to-all of rows"), HasSubstr("all-to-all of columns")));
  });
}

TEST_P(AllToAllOver, RefusesSizesThatDoNotAddUp) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto collectives = collectives_of(mesh, 0);
    const auto sent = at::zeros({8}, at::kByte);
    expect_error<c10::ValueError>(
        [&] {
          collectives.start(AllToAllOptions{.input = sent,
                                            .input_split_sizes = {4, 5},
                                            .output_split_sizes = {4, 5},
                                            .what = "all-to-all"});
        },
        HasSubstr("8 elements of Byte, expected 9"));
    expect_error<c10::ValueError>(
        [&] {
          collectives.start(AllToAllOptions{.input = sent,
                                            .input_split_sizes = {8},
                                            .output_split_sizes = {4, 5},
                                            .what = "all-to-all"});
        },
        HasSubstr("sizes for 1 and from 2 ranks, expected 2"));
    std::vector<int64_t> to = {4, 4};
    to[static_cast<size_t>(rank)] = 4;
    std::vector<int64_t> from = to;
    from[static_cast<size_t>(rank)] = 3;
    expect_error<c10::ValueError>(
        [&] {
          collectives.start(AllToAllOptions{.input = sent,
                                            .input_split_sizes = to,
                                            .output_split_sizes = from,
                                            .what = "all-to-all"});
        },
        HasSubstr("from this rank itself"));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, AllToAllOver, ::testing::Values("on", "off"),
                         [](const auto& info) {
                           return std::string(info.param) == "on" ? "PeerMemory" : "Gloo";
                         });

}  // namespace
}  // namespace fsdp::internal
