#include "tests/fully_shard/decoder.h"
#include "tests/support/instrumented.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <fstream>
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

class Lifetime : public ::testing::TestWithParam<int64_t> {};

TEST_P(Lifetime, AThousandModelsLeaveNothingBehind) {
  const auto world = GetParam();
  run_ranks(
      world,
      [&](int64_t) {
        const auto mesh = init_device_mesh(torch::kCPU, {world});
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
        EXPECT_EQ(after.unsharded_bytes, before.unsharded_bytes);
        EXPECT_EQ(after.staging_bytes, 0);
        EXPECT_EQ(after.gradient_bytes, 0);
        EXPECT_LE(bytes_in_use() - in_use, 2 * 1024 * 1024);
      },
      std::chrono::minutes(3));
}

TEST_P(Lifetime, AGraphOutlivesItsModuleAndDeadEntriesAreStillReduced) {
  const auto world = GetParam();
  run_ranks(world, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {world});
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
    EXPECT_EQ(counters(mesh).reduce_scatters - before, world == 1 ? 0 : 1);
    loss.reset();
    EXPECT_EQ(counters(mesh).unsharded_bytes, 0);
  });
}

INSTANTIATE_WORLDS(Lifetime, 1, 2);

}  // namespace
}  // namespace fsdp::testing
