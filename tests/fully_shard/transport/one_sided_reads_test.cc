// Where ranks share memory a touch is no collective: each rank reads units when, and as
// often as, it likes. What ranks may not do is an error that names unit and ranks.
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/raw_access.h"
#include "fully_shard/units/unit.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/slowdown.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

torch::Tensor input(int64_t rank, int64_t step) {
  return torch::linspace(-1, 1, 8).view({2, 4}) + 0.1 * static_cast<double>(rank + 2 * step);
}

// A sharded model beside a plain one that sees all ranks' data.
struct Twins {
  explicit Twins(const DeviceMesh& mesh, const FullyShardOptions& options = {})
      : world(mesh.size()), model(sharded(Pair(4, 8, 8), mesh, options)) {}

  void step(int64_t rank, int64_t number) {
    for (int64_t each = 0; each < world; ++each)
      (plain(input(each, number)).pow(2).sum() / world).backward();
    model(input(rank, number)).pow(2).sum().backward();
    for (auto* optimizer : {&of_plain, &of_model}) {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  // Reads the newest values of all ranks.
  void expect_equal_forward() {
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(model(input(0, 0)), plain(input(0, 0)), 1e-5, 1e-6));
  }

  int64_t world;
  Pair plain = Pair(4, 8, 8), model;
  torch::optim::SGD of_plain{plain->parameters(), 0.1}, of_model{model->parameters(), 0.1};
};

using OneSidedReads = Worlds;

TEST_P(OneSidedReads, OfOneRankAloneAfterEachStep) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Twins twins(mesh);
    for (int64_t number = 0; number < 4; ++number) {
      twins.step(rank, number);
      for (int64_t i = 0; i < (rank + number) % 3; ++i) twins.expect_equal_forward();
    }
    twins.expect_equal_forward();
  });
}

TEST_P(OneSidedReads, OfRankZeroWhileTheOthersWaitForItElsewhere) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Twins twins(mesh);
    twins.step(rank, 0);
    if (rank == 0) {
      for (int64_t token = 0; token < 3; ++token) twins.expect_equal_forward();
    }
    internal::collectives_of(mesh, 0).barrier("the user's own barrier");
    twins.step(rank, 1);
    twins.expect_equal_forward();
  });
}

TEST_P(OneSidedReads, OfUnitsInAnotherOrderOnEachRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Twins twins(mesh);
    twins.step(rank, 0);
    const torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < 2; ++i) {
      const bool first = (rank + i) % 2 == 0;
      const auto& sharded = first ? twins.model->first : twins.model->second;
      const auto& plain = first ? twins.plain->first : twins.plain->second;
      EXPECT_TRUE(torch::allclose(sharded->weight.sum(), plain->weight.sum(), 1e-5, 1e-6));
    }
  });
}

TEST_P(OneSidedReads, OfAnotherNumberOfMicroBatchesOnEachRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Twins twins(mesh, {.reshard_after_forward = true});
    for (int64_t each = 0; each < world(); ++each) {
      for (int64_t batch = 0; batch <= each; ++batch)
        (twins.plain(input(each, batch)).pow(2).sum() / world()).backward();
    }
    {
      const NoSyncGuard no_sync(get_fsdp_module(*twins.model));
      for (int64_t batch = 0; batch < rank; ++batch)
        twins.model(input(rank, batch)).pow(2).sum().backward();
    }
    twins.model(input(rank, rank)).pow(2).sum().backward();
    for (auto* optimizer : {&twins.of_plain, &twins.of_model}) optimizer->step();
    twins.expect_equal_forward();
  });
}

// A rank that comes late reads what was there before the others wrote again.
TEST_P(OneSidedReads, OfARankThatComesLate) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 8);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    for (int64_t value = 0; value < 12; ++value) {
      layer->parameters()[0].fill_(static_cast<double>(value));
      if (value % world() == rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(layer->weight.sum().item<float>(), static_cast<float>(32 * value));
    }
  });
}

TEST_P(OneSidedReads, OfARankThatComesLateWhereAliasesAreWritten) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 8);
    fully_shard(layer, mesh);
    const torch::NoGradGuard no_grad;
    auto alias = DTensor(layer->parameters()[0]).to_local();
    for (int64_t value = 0; value < 12; ++value) {
      alias.fill_(static_cast<double>(value));
      mark_shard_written(layer->parameters()[0]);
      if (value % world() == rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(layer->weight.sum().item<float>(), static_cast<float>(32 * value));
    }
  });
}

// What is sent of an entry is not what is written to it afterwards.
TEST_P(OneSidedReads, OfEntriesByCollectives) {
  for (const bool stays : {false, true}) {
    SCOPED_TRACE(stays ? "written where it lies, since an alias is out" : "may move");
    on_ranks([stays](int64_t, const DeviceMesh& mesh) {
      auto layer = make_linear(64, 64);
      fully_shard(layer, mesh);
      const torch::NoGradGuard no_grad;
      const auto alias = stays ? DTensor(layer->parameters()[0]).to_local() : at::Tensor();
      for (int64_t value = 0; value < 50; ++value) {
        layer->parameters()[0].fill_(static_cast<double>(value));
        EXPECT_TRUE(
            full_value(layer->parameters()[0]).eq(static_cast<double>(value)).all().item<bool>());
      }
    });
  }
}

// Units come and go with their memory, read by the others or not.
TEST_P(OneSidedReads, OfUnitsThatGo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < 20; ++i) {
      auto layer = make_linear(4, 8);
      fully_shard(layer, mesh);
      if (i % 3 != rank) continue;
      EXPECT_TRUE(layer->weight.isfinite().all().item<bool>());
    }
  });
}

INSTANTIATE_WORLDS(OneSidedReads, 2, 3, 4);

TEST(UnitsThatAreRead, AreThoseOfOneDtypeInHostMemory) {
  on_ranks_of(4, [](const DeviceMesh& mesh) {
    const auto is_read = [&](int64_t rows, const FullyShardOptions& options) {
      auto layer = make_linear(4, rows);
      return internal::unit_of(fully_shard(layer, mesh, options))->group()->shards().shared() !=
             nullptr;
    };
    for (const int64_t rows : {7, 5, 1}) EXPECT_TRUE(is_read(rows, {})) << rows;
    EXPECT_FALSE(is_read(7, {.mp_policy = {.param_dtype = torch::kBFloat16}}));
  });
}

// Every rank has an error that names `unit`, and soon.
class WritesThatDiffer : public Worlds {
 protected:
  void expect_named(const std::function<void(int64_t rank, Twins& twins)>& program) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      Twins twins(mesh);
      const auto begin = std::chrono::steady_clock::now();
      const auto message = message_of([&] {
        program(rank, twins);
        for (int64_t number = 0; number < 3; ++number) twins.step(rank, number);
      });
      EXPECT_THAT(message, AllOf(HasSubstr("the shards of unit '"), HasSubstr("rank 0"),
                                 AnyOf(HasSubstr("have not written them alike"),
                                       HasSubstr("rank 0 has read them as"),
                                       HasSubstr("write operators made them, for rank 1"),
                                       HasSubstr("failed before"))));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(10));
    });
  }
};

TEST_P(WritesThatDiffer, AStepThatOneRankSkips) {
  expect_named([](int64_t rank, Twins& twins) {
    twins.step(rank, 0);
    twins.model(input(rank, 0)).sum().backward();
    if (rank != 1) twins.of_model.step();
  });
}

TEST_P(WritesThatDiffer, AWriteOfOneRankAlone) {
  expect_named([](int64_t rank, Twins& twins) {
    const torch::NoGradGuard no_grad;
    twins.model(input(0, 0));
    if (rank == 0) twins.model->second->parameters()[1].mul_(2);
  });
}

TEST_P(WritesThatDiffer, AReadOfOneRankBetweenTwoWrites) {
  expect_named([](int64_t rank, Twins& twins) {
    twins.step(rank, 0);
    const torch::NoGradGuard no_grad;
    if (rank == 0) twins.model->first->weight.sum();
    for (auto& entry : twins.model->parameters()) entry.mul_(0.5);
  });
}

INSTANTIATE_WORLDS(WritesThatDiffer, 2, 3);

}  // namespace
}  // namespace fsdp::testing
