#include "fully_shard/units/unit.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/full_value.h"
#include "tests/support/instrumented.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <new>
#include <thread>
#include <vector>
#ifdef FSDP_INSTRUMENTED
extern "C" size_t
__sanitizer_get_current_allocated_bytes();  // not every compiler brings the header
#endif

namespace fsdp::testing {
namespace {

#ifdef FSDP_INSTRUMENTED
// What is resident includes the sanitizer's own books, which grow, and freed memory that
// it keeps.
int64_t bytes_in_use() { return static_cast<int64_t>(__sanitizer_get_current_allocated_bytes()); }
#else
int64_t bytes_in_use() {
  malloc_trim(0);
  int64_t total_pages = 0, resident_pages = 0;
  std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}
#endif

// Another rank, a thread of this process, has a module where one of this rank's was.
TEST(LifetimeOfUnits, IsEndedByTheThreadThatAttachedThem) {
  alignas(torch::nn::LinearImpl) std::byte memory[sizeof(torch::nn::LinearImpl)];
  const auto module_there = [&memory] {
    return std::shared_ptr<torch::nn::LinearImpl>(
        new (memory) torch::nn::LinearImpl(1, 1),
        [](torch::nn::LinearImpl* module) { module->~LinearImpl(); });
  };
  const auto attach_to = [](torch::nn::Module& module) {
    const auto unit = std::make_shared<internal::Unit>(internal::UnitPolicy{});
    internal::attach_unit(module, unit);
    return std::weak_ptr<internal::Unit>(unit);
  };
  const std::weak_ptr<internal::Unit> first = attach_to(*module_there());
  std::thread([&] {
    const auto module = module_there();
    attach_to(*module);
    EXPECT_NE(internal::find_unit(*module), first.lock());
    EXPECT_FALSE(first.expired());
  }).join();
  const auto next = std::make_shared<torch::nn::LinearImpl>(1, 1);
  attach_to(*next);
  EXPECT_TRUE(first.expired());
}

class Lifetime : public Worlds {};

TEST_P(Lifetime, AThousandModelsLeaveNothingBehind) {
  run_ranks(
      world(),
      [&](int64_t) {
        const auto mesh = init_device_mesh(torch::kCPU, {world()});
        auto witness = std::make_shared<torch::nn::LinearImpl>(2, 2);  // keeps the counters
        fully_shard(*witness, mesh);
        const auto before = counters(mesh);
        int64_t in_use = 0;
        for (int i = 1; i <= 1000; ++i) {
          auto model = build_seeded([] { return decoder_model(4, 1); });
          shard_decoder(*model.module, mesh);
          torch::optim::SGD optimizer(model.module->parameters(), 0.1);
          model.loss(make_data(1)).backward();
          optimizer.step();
          if (i == 100) in_use = bytes_in_use();
        }
        const auto after = counters(mesh);
        EXPECT_EQ(after.sharded_bytes, before.sharded_bytes);
        EXPECT_EQ(resident_bytes(after), resident_bytes(before));
        EXPECT_EQ(after.staging_bytes, 0);
        EXPECT_EQ(after.gradient_bytes, 0);
        EXPECT_LE(bytes_in_use() - in_use, 2 * 1024 * 1024);
      },
      std::chrono::minutes(3));
}

TEST_P(Lifetime, AGraphOutlivesItsModuleAndDeadEntriesAreStillReduced) {
  on_ranks([&](const DeviceMesh& mesh) {
    auto witness = std::make_shared<torch::nn::LinearImpl>(2, 2);
    fully_shard(*witness, mesh);
    torch::Tensor input = torch::ones({4, 16}).set_requires_grad(true), loss;
    {
      torch::nn::Linear linear(16, 6);
      {
        torch::NoGradGuard no_grad;
        linear->weight.fill_(0.5);
        linear->bias.fill_(0.25);
      }
      fully_shard(linear, mesh, {.reshard_after_forward = true});
      loss = linear(input).sum();
    }
    const auto before = counters(mesh).reduce_scatters;
    loss.backward();
    EXPECT_TRUE(torch::equal(input.grad(), torch::full({4, 16}, 3.0)));
    EXPECT_EQ(counters(mesh).reduce_scatters - before, world() == 1 ? 0 : 1);
    loss.reset();
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// The units of a model that died after one backward. A unit has no group once the
// parameters are gone.
std::vector<FSDPModule> units_of_a_dropped_model(const DeviceMesh& mesh, bool is_last_backward) {
  auto model = build_seeded([] { return decoder_model(4, 2); });
  shard_decoder(*model.module, mesh);
  get_fsdp_module(*model.module).set_is_last_backward(is_last_backward);
  model.loss(make_data(1)).backward();
  auto units = fsdp_modules(*model.module);
  for (const auto& unit : units) EXPECT_NE(internal::unit_of(unit)->group(), nullptr);
  EXPECT_GT(counters(mesh).sharded_bytes, 0);
  return units;
}

TEST_P(Lifetime, AModelThatIsDroppedBeforeItsLastBackwardIsFreed) {
  on_ranks([](const DeviceMesh& mesh) {
    for (const bool is_last_backward : {true, false}) {
      SCOPED_TRACE(is_last_backward ? "after the last backward" : "before the last backward");
      for (const auto& unit : units_of_a_dropped_model(mesh, is_last_backward))
        EXPECT_EQ(internal::unit_of(unit)->group(), nullptr) << unit.name();
      // No unit lives on the mesh, so nothing is counted; nor is it when one comes.
      EXPECT_EQ(counters(mesh).sharded_bytes, 0);
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      EXPECT_EQ(counters(mesh).staging_bytes, 0);
      EXPECT_EQ(counters(mesh).peak_bytes, 0);
      EXPECT_EQ(counters(mesh).all_gathers, 0);
      EXPECT_EQ(counters(mesh).reduce_scatters, 0);
      auto next = make_linear(2, 2);
      fully_shard(next, mesh);
      EXPECT_EQ(counters(mesh).all_gathers, 0);
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    }
  });
}

TEST_P(Lifetime, AModelThatIsDroppedBeforeItsLastBackwardLeavesAnotherAsItWas) {
  on_ranks([](const DeviceMesh& mesh) {
    auto witness = make_linear(2, 2);  // keeps the counters
    fully_shard(witness, mesh);
    const auto before = counters(mesh);
    for (const auto& unit : units_of_a_dropped_model(mesh, /*is_last_backward=*/false))
      EXPECT_EQ(internal::unit_of(unit)->group(), nullptr) << unit.name();
    EXPECT_EQ(counters(mesh).sharded_bytes, before.sharded_bytes);
    EXPECT_EQ(resident_bytes(counters(mesh)), resident_bytes(before));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    witness(torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(torch::equal(full_gradient(witness->parameters()[1]), torch::ones({2})));
  });
}

// What their backwards brought and nobody took, a megabyte each, goes with them.
TEST_P(Lifetime, ModelsThatAreDroppedBeforeTheirLastBackwardLeaveNoMemory) {
  on_ranks([](const DeviceMesh& mesh) {
    constexpr int64_t kWidth = 512, kMegabyte = kWidth * kWidth * 4;
    auto witness = make_linear(2, 2);  // its mesh goes on
    fully_shard(witness, mesh);
    int64_t in_use = 0;
    for (int i = 1; i <= 60; ++i) {
      auto layer = make_linear(kWidth, kWidth);
      fully_shard(layer, mesh).set_is_last_backward(false);
      layer(torch::ones({1, kWidth})).sum().backward();
      if (i == 10) in_use = bytes_in_use();
    }
    EXPECT_LE(bytes_in_use() - in_use, 15 * kMegabyte);
  });
}

INSTANTIATE_WORLDS(Lifetime, 1, 2);

}  // namespace
}  // namespace fsdp::testing
