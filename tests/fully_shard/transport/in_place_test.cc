// Where all ranks have their shards in one piece of memory, members show that memory
// itself: nothing is copied, until something is written or pointers may be out.
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/raw_access.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"
#include "tests/support/write_checks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using InPlace = Worlds;

// Counters of a unit that is unsharded by hand.
Counters unsharded(const DeviceMesh& mesh, FSDPModule unit) {
  unit.unshard();
  return counters(mesh);
}

TEST_P(InPlace, AModelTrainsWithoutCopiesOfItsParameters) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    for (int step = 0; step < 3; ++step) {
      decoder.forward();
      EXPECT_GT(counters(mesh).in_place_bytes, 0);
      EXPECT_EQ(counters(mesh).unsharded_bytes, 0);
      decoder.backward();
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
      decoder.update();
    }
  });
}

TEST_P(InPlace, CopiesAreMadeWhereTheEnvironmentAsksForThem) {
  const WithEnvironment copies("FSDP_PEER_MEMORY", "copy");
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.forward();
    EXPECT_EQ(counters(mesh).in_place_bytes, 0);
    EXPECT_GT(counters(mesh).unsharded_bytes, 0);
  });
}

TEST_P(InPlace, WriteChecksCompareCopies) {
  const WriteChecks checks;
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    EXPECT_EQ(unsharded(mesh, decoder.head()).in_place_bytes, 0);
  });
}

TEST_P(InPlace, ParametersThatAreCutAlongAnotherDimensionAreCopied) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(8, 8);
    fully_shard(linear, mesh,
                {.shard_placement_fn = [](const std::string&, const torch::Tensor& t) {
                  return t.dim() == 2 ? std::optional<Shard>(Shard(1)) : std::nullopt;
                }});
    EXPECT_EQ(unsharded(mesh, get_fsdp_module(*linear)).in_place_bytes, 0);
    EXPECT_GT(counters(mesh).unsharded_bytes, 0);
  });
}

// Else other ranks would see it before it is written back, and at once.
TEST_P(InPlace, AMemberThatIsWrittenIsACopy) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(8, 8);
    fully_shard(linear, mesh);
    const auto before = full_value(linear->named_parameters()["weight"]).clone();
    const torch::NoGradGuard no_grad;
    auto unit = get_fsdp_module(*linear);
    EXPECT_GT(unsharded(mesh, unit).in_place_bytes, 0);
    linear->weight.mul_(2);
    EXPECT_EQ(counters(mesh).in_place_bytes, 0);
    EXPECT_GT(counters(mesh).unsharded_bytes, 0);
    unit.reshard();
    EXPECT_TRUE(torch::equal(linear->weight, 2 * before));
  });
}

TEST_P(InPlace, PointersOfAHeldUnitAreToACopy) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(8, 8);
    fully_shard(linear, mesh);
    const torch::NoGradGuard no_grad;
    auto unit = get_fsdp_module(*linear);
    EXPECT_GT(unsharded(mesh, unit).in_place_bytes, 0);
    const auto before = linear->weight.clone();
    {
      const Unsharded held(linear->weight);
      EXPECT_EQ(counters(mesh).in_place_bytes, 0);
      *linear->weight.data_ptr<float>() = 1000;  // nobody is told
    }
    unit.reshard();
    EXPECT_TRUE(torch::equal(linear->weight, before));
  });
}

// It stays unsharded, and stale, while a graph that was recorded with it is alive.
TEST_P(InPlace, AnEntryIsWrittenWhileItsUnitIsUnsharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(8, 8);
    fully_shard(linear, mesh);
    auto unit = get_fsdp_module(*linear);
    const auto before = full_value(linear->named_parameters()["weight"]).clone();
    for (int write = 1; write < 4; ++write) {
      unit.unshard();
      const torch::NoGradGuard no_grad;
      linear->named_parameters()["weight"].mul_(2);
      EXPECT_EQ(counters(mesh).in_place_bytes, 0);
      EXPECT_TRUE(torch::equal(linear->weight, std::pow(2, write) * before)) << write;
    }
  });
}

// fully_shard is local: other ranks may come to it when this one waits for them
// elsewhere.
TEST_P(InPlace, BeginsWithTheFirstStepWhereRanksShardOneAfterTheOther) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto other = make_linear(2, 2);
    fully_shard(other, mesh);  // the first one on a mesh is collective
    const auto group = internal::collectives_of(mesh, 0);
    for (int64_t turn = mesh.size(); turn > rank; --turn) group.barrier("the ranks before");
    auto linear = make_linear(8, 8);
    fully_shard(linear, mesh);
    for (int64_t turn = rank; turn > 0; --turn) group.barrier("the ranks behind");
    torch::optim::SGD optimizer(linear->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      linear(torch::ones({2, 8})).sum().backward();
      optimizer.step();
    }
    EXPECT_GT(unsharded(mesh, get_fsdp_module(*linear)).in_place_bytes, 0);
  });
}

INSTANTIATE_WORLDS(InPlace, 2, 3);

}  // namespace
}  // namespace fsdp::testing
