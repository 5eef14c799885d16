// The transport gives the same bytes and the same bits in every world, and so do shards
// that ranks read by themselves.
#include "fully_shard/transport/transport.h"

#include "device_mesh/collectives/operations.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using testing::run_ranks;

void fill(const at::Tensor& bytes, int64_t seed) {
  auto* data = static_cast<unsigned char*>(bytes.data_ptr());
  for (int64_t i = 0; i < bytes.numel(); ++i)
    data[i] = static_cast<unsigned char>((i * 31 + seed * 17) & 0xff);
}

bool holds(const char* row, int64_t bytes, int64_t seed) {
  const auto expected = at::zeros({bytes}, at::kByte);
  fill(expected, seed);
  const auto* bytes_expected = static_cast<const char*>(expected.const_data_ptr());
  return std::equal(bytes_expected, bytes_expected + bytes, row);
}

// Values whose sum depends on the order of the additions in every floating type.
at::Tensor term(int64_t rank, int64_t receiver, int64_t elements, at::ScalarType dtype) {
  return at::arange(elements, at::kDouble)
      .add(static_cast<double>(1 + receiver))
      .mul(rank % 2 == 0 ? 1.37 : -0.73)
      .add(static_cast<double>(rank) * 1e-3)
      .to(dtype);
}

class Transports : public ::testing::TestWithParam<int64_t> {
 protected:
  static int64_t world() { return GetParam(); }

  // One mesh and transport per rank.
  template <class Body>
  void on_ranks(const Body& body) const {
    run_ranks(world(), [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {world()});
      const auto transport = std::make_unique<Transport>(mesh, 0);
      EXPECT_EQ(transport->shard_rank(), rank);
      EXPECT_EQ(transport->shard_count(), world());
      body(rank, *transport);
    });
  }
};

TEST_P(Transports, AGatherGivesEveryRanksBytes) {
  on_ranks([&](int64_t rank, Transport& transport) {
    for (int64_t bytes : {0, 1, 64, 1000, 300000}) {
      const auto shards = transport.shard_memory(bytes, c10::kCPU);
      EXPECT_TRUE(at::equal(shards, at::zeros({bytes}, at::kByte)));
      fill(shards, rank);
      auto gather = transport.gather(shards, {.unit = 1, .unit_name = "u"});
      EXPECT_LE(gather.staging_bytes(), world() * bytes);
      const auto rows = gather.wait();
      for (int64_t r = 0; r < world(); ++r) EXPECT_TRUE(holds(rows.row(r), bytes, r)) << r;
    }
  });
}

TEST_P(Transports, GathersInFlightTogetherKeepTheirBytesApartAndRowsStayAsLongAsTheyAreHeld) {
  on_ranks([&](int64_t rank, Transport& transport) {
    std::vector<at::Tensor> shards;
    for (int64_t unit = 0; unit < 4; ++unit) {
      shards.push_back(transport.shard_memory(100 * (unit + 1), c10::kCPU));
      fill(shards.back(), 10 * unit + rank);
    }
    std::vector<std::optional<InFlight<GatheredRows>>> gathers;
    for (uint32_t unit = 0; unit < 4; ++unit)
      gathers.push_back(transport.gather(shards[unit], {.unit = unit, .unit_name = "u"}));
    gathers[1].reset();  // nobody wants this one
    std::vector<GatheredRows> rows;
    for (const auto unit : {3, 0, 2}) {
      rows.push_back(gathers[static_cast<size_t>(unit)]->wait());
      gathers[static_cast<size_t>(unit)].reset();
      for (int64_t r = 0; r < world(); ++r)
        EXPECT_TRUE(holds(rows.back().row(r), 100 * (unit + 1), 10 * unit + r));
    }
    for (int64_t r = 0; r < world(); ++r) EXPECT_TRUE(holds(rows.front().row(r), 400, 30 + r));
  });
}

TEST_P(Transports, AReductionAddsInTheOrderOfTheRanksInTheTypeOfSums) {
  on_ranks([&](int64_t rank, Transport& transport) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                             at::kComplexFloat, at::kComplexDouble}) {
      for (int64_t elements : {0, 1, 7, 5000}) {
        const auto size = static_cast<int64_t>(c10::elementSize(dtype));
        auto rows = transport.row_memory(elements * size, c10::kCPU);
        for (int64_t r = 0; r < world(); ++r)
          if (elements > 0) rows.select(0, r).view(dtype).copy_(term(rank, r, elements, dtype));
        auto reduction =
            transport.reduce(rows, internal::Summands(dtype), {.unit = 2, .unit_name = "u"});
        rows.reset();
        const auto sum = reduction.wait().row;
        auto expected = term(0, rank, elements, dtype).to(sum_dtype(dtype));
        for (int64_t r = 1; r < world(); ++r)
          expected = expected + term(r, rank, elements, dtype).to(sum_dtype(dtype));
        EXPECT_EQ(sum.scalar_type(), sum_dtype(dtype));
        EXPECT_TRUE(at::equal(sum, expected)) << dtype << ", " << elements << " elements";
      }
    }
  });
}

TEST_P(Transports, AnAbandonedReductionStillServesTheOthers) {
  on_ranks([&](int64_t rank, Transport& transport) {
    for (uint32_t unit = 0; unit < 3; ++unit) {
      auto rows = transport.row_memory(80, c10::kCPU);
      rows.view(at::kFloat).fill_(static_cast<float>(rank + 1));
      auto reduction =
          transport.reduce(rows, internal::Summands(at::kFloat), {.unit = unit, .unit_name = "u"});
      if (unit == 1 && rank == 0) continue;  // destroys it
      const auto total = static_cast<float>(world() * (world() + 1)) / 2;
      EXPECT_TRUE(at::equal(reduction.wait().row, at::zeros({20}).add(total)));
    }
  });
}

TEST_P(Transports, ShardsAreReadAsTheyAreAfterTheWritesOfAllRanks) {
  on_ranks([&](int64_t rank, Transport& transport) {
    const auto shards = transport.shard_memory(5000, c10::kCPU);
    for (int64_t step = 0; step < 20; ++step) {
      fill(shards, 100 * step + rank);
      const auto rows = transport.gather(shards, {.unit = 1, .unit_name = "u"}).wait();
      for (int64_t r = 0; r < world(); ++r)
        EXPECT_TRUE(holds(rows.row(r), 5000, 100 * step + r)) << "step " << step;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Transports, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return "World" + std::to_string(info.param); });

}  // namespace
}  // namespace fsdp::internal
