// What the transport says when ranks do not do the same: never an abort, both
// operations named on every rank, in ranks of the whole job.
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/transport/transport.h"
#include "tests/support/errors.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/worlds.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::on_ranks_of;
using testing::run_ranks;

Issue unit(uint32_t number) {
  return {.unit = number,
          .unit_name = "l" + std::to_string(number),
          .words = {.agreement = 100 + number}};
}

// Bytes of every unit differ.
at::Tensor shards_of(Transport& transport, uint32_t number) {
  return transport.shard_memory(96 + 64 * static_cast<int64_t>(number), c10::kCPU);
}

void gather(Transport& transport, uint32_t number) {
  transport.gather(shards_of(transport, number), unit(number)).wait();
}

void reduce(Transport& transport, uint32_t number) {
  transport
      .reduce(transport.row_memory(32 + 32 * static_cast<int64_t>(number), c10::kCPU),
              internal::Summands(at::kFloat), unit(number))
      .wait();
}

void full_tensor(const DeviceMesh& mesh) {
  auto all = at::empty({mesh.size() * 5});
  const auto own = at::zeros({5});
  collectives_of(mesh, 0).all_gather(
      {.output = all, .input = own, .what = "redistribute of [11, 7]"});
}

class Divergence : public ::testing::TestWithParam<int64_t> {
 protected:
  // Rank 0 does `one`, all others `other`: an error on every rank that names both.
  void expect_error(const std::function<void(Transport&, const DeviceMesh&)>& one,
                    const std::function<void(Transport&, const DeviceMesh&)>& other,
                    const std::string& one_name, const std::string& other_name) const {
    run_ranks(GetParam(), [&](int64_t rank) {
      const auto begin = std::chrono::steady_clock::now();
      const auto mesh = init_device_mesh(c10::kCPU, {GetParam()});
      const auto transport = std::make_unique<Transport>(mesh, 0);
      gather(*transport, 9);  // the same on all ranks
      const auto error =
          message_of<c10::Error>([&] { (rank == 0 ? one : other)(*transport, mesh); });
      EXPECT_THAT(error,
                  AllOf(HasSubstr("out of order"), HasSubstr(one_name), HasSubstr(other_name)))
          << "rank " << rank;
      // And nothing more is issued, with the first failure as the reason.
      EXPECT_THAT(message_of<c10::Error>([&] { gather(*transport, 3); }),
                  AllOf(HasSubstr("all-gather of unit 'l3' can not go on"),
                        HasSubstr("out of order"), HasSubstr(one_name)));
      EXPECT_THAT(message_of<c10::Error>([&] { reduce(*transport, 3); }),
                  HasSubstr("can not go on"));
      EXPECT_THAT(message_of<c10::Error>([&] { full_tensor(mesh); }), HasSubstr("can not go on"));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "waited";
    });
  }
};

TEST_P(Divergence, GathersOfUnitsOfDifferentSize) {
  expect_error([](auto& transport, auto&) { gather(transport, 1); },
               [](auto& transport, auto&) { gather(transport, 4); }, "all-gather of unit 'l1'",
               "all-gather of unit 'l4'");
}

TEST_P(Divergence, ReductionsOfUnitsOfDifferentSize) {
  expect_error([](auto& transport, auto&) { reduce(transport, 1); },
               [](auto& transport, auto&) { reduce(transport, 4); }, "reduce-scatter of unit 'l1'",
               "reduce-scatter of unit 'l4'");
}

// Gradients complete at different times on different ranks, so this is no divergence.
TEST_P(Divergence, AReductionMayLeaveBeforeOrAfterAGather) {
  on_ranks_of(GetParam(), [&](int64_t rank, const DeviceMesh& mesh) {
    const auto transport = std::make_unique<Transport>(mesh, 0);
    const auto shards = transport->shard_memory(64, c10::kCPU);
    std::optional<InFlight<GatheredRows>> gathering;
    std::optional<InFlight<SummedRow>> reducing;
    const auto issue_gather = [&] { gathering.emplace(transport->gather(shards, unit(1))); };
    const auto issue_reduction = [&] {
      auto rows = transport->row_memory(32, c10::kCPU);
      rows.zero_();
      reducing.emplace(transport->reduce(std::move(rows), internal::Summands(at::kFloat), unit(2)));
    };
    if (rank == 0) issue_reduction();
    issue_gather();
    if (rank != 0) issue_reduction();
    EXPECT_NO_THROW(gathering->wait());
    EXPECT_NO_THROW(reducing->wait());
  });
}

TEST_P(Divergence, AFullTensorAgainstAGather) {
  expect_error([](auto&, auto& mesh) { full_tensor(mesh); },
               [](auto& transport, auto&) { gather(transport, 4); }, "redistribute of [11, 7]",
               "all-gather of unit 'l4'");
}

TEST_P(Divergence, OneRankIsAheadByPrefetches) {
  expect_error(
      [](auto& transport, auto&) {
        const auto shards = shards_of(transport, 1), next = shards_of(transport, 2);
        auto first = transport.gather(shards, unit(1));
        auto prefetched = transport.gather(next, unit(2));
        first.wait();
      },
      [](auto& transport, auto&) { gather(transport, 2); }, "all-gather of unit 'l1'",
      "all-gather of unit 'l2'");
}

TEST_P(Divergence, TheSameUnitAfterADifferentHistoryOrWithAnotherSize) {
  expect_error(
      [](auto& transport, auto&) {
        transport.gather(transport.shard_memory(64, c10::kCPU), unit(1)).wait();
      },
      [](auto& transport, auto&) {
        transport.gather(transport.shard_memory(128, c10::kCPU), unit(1)).wait();
      },
      "all-gather of unit 'l1'", "of another size or after a different history");
}

INSTANTIATE_TEST_SUITE_P(Worlds, Divergence, ::testing::Values(2, 3),
                         [](const auto& info) { return "World" + std::to_string(info.param); });

TEST(TransportErrors, AgreementsOfAllRanksComeWithTheGather) {
  run_ranks(3, [](int64_t rank) {
    const auto transport = std::make_unique<Transport>(init_device_mesh(c10::kCPU, {3}), 0);
    const auto shards = transport->shard_memory(64, c10::kCPU);
    const auto rows =
        transport
            ->gather(shards,
                     {.unit = 0, .unit_name = "u", .words = {7 * static_cast<uint64_t>(rank)}})
            .wait();
    EXPECT_EQ(rows.words(), (std::vector<NoticeWords>{{0}, {7}, {14}}));
    EXPECT_TRUE(transport->checks_stamps());
  });
}

TEST(TransportErrors, OnASliceMessagesGiveRanksOfTheWholeJob) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"tp", "dp"});
    const auto transport = std::make_unique<Transport>(mesh["dp"], 0);
    EXPECT_EQ(transport->shard_rank(), rank % 2);
    if (rank < 2) return;  // the other row does nothing at all
    const auto error = message_of<c10::Error>([&] { gather(*transport, rank == 2 ? 1 : 2); });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 2 issued"), HasSubstr("rank 3 issued"),
                             Not(HasSubstr("rank 0")), Not(HasSubstr("rank 1"))));
  });
}

TEST(TransportErrors, ARankThatIsGoneIsNamedWithItsRankInTheWholeJob) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"tp", "dp"});
    const auto transport = std::make_unique<Transport>(mesh["dp"], 0);
    if (rank != 2) return;  // leaves
    EXPECT_THAT(
        message_of<c10::Error>([&] { gather(*transport, 1); }),
        AllOf(HasSubstr("all-gather of unit 'l1' failed on rank 2"), HasSubstr("of ranks 2, 3")));
  });
}

TEST(TransportErrors, TwoModelsOnOneGroupShareOneOrder) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto a = std::make_unique<Transport>(mesh, 0), b = std::make_unique<Transport>(mesh, 0);
    gather(*a, 1);
    gather(*b, 1);
    const auto error =
        message_of<c10::Error>([&] { gather(rank == 0 ? *a : *b, rank == 0 ? 1 : 2); });
    EXPECT_THAT(error, AllOf(HasSubstr("'l1'"), HasSubstr("'l2'")));
    EXPECT_THAT(message_of<c10::Error>([&] { gather(rank == 0 ? *b : *a, 1); }),
                HasSubstr("can not go on"));
  });
}

}  // namespace
}  // namespace fsdp::internal
