// Memory that is taken and given back again and again.
#include "device_mesh/collectives/scratch_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <set>
#include <vector>

namespace fsdp::internal {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeepsBlocks = false;
#else
constexpr bool kKeepsBlocks = true;
#endif

at::Tensor floats(int64_t count) { return scratch_memory({count}, at::kFloat, c10::kCPU); }

TEST(ScratchMemory, IsAnOrdinaryTensor) {
  const auto memory = scratch_memory({3, 5}, at::kDouble, c10::kCPU);
  EXPECT_EQ(memory.sizes(), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(memory.scalar_type(), at::kDouble);
  EXPECT_TRUE(memory.is_contiguous());
  EXPECT_FALSE(memory.requires_grad());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data_ptr()) % 64, 0U);
  memory.fill_(2);
  EXPECT_EQ(memory.sum().item<double>(), 30);
  EXPECT_EQ(scratch_memory({0, 4}, at::kByte, c10::kCPU).numel(), 0);
}

TEST(ScratchMemory, OfLivingTensorsIsApart) {
  std::vector<at::Tensor> alive;
  std::set<const void*> blocks;
  for (int64_t i = 0; i < 20; ++i) {
    alive.push_back(floats(100).fill_(static_cast<double>(i)));
    blocks.insert(alive.back().const_data_ptr());
  }
  EXPECT_EQ(blocks.size(), alive.size());
  for (int64_t i = 0; i < 20; ++i)
    EXPECT_TRUE(alive[static_cast<size_t>(i)].eq(static_cast<double>(i)).all().item<bool>());
}

TEST(ScratchMemory, OfASmallTensorIsTheNextOnes) {
  if (!kKeepsBlocks) GTEST_SKIP() << "sanitizers see every block given back";
  std::set<const void*> blocks;
  for (int i = 0; i < 50; ++i) {
    const auto memory = floats(777);
    blocks.insert(memory.const_data_ptr());
    std::vector<char> other(777 * 4);  // would get a block that malloc was given
  }
  EXPECT_EQ(blocks.size(), 1U);
}

TEST(ScratchMemory, StaysWhileAViewLives) {
  auto view = floats(333).fill_(7).narrow(0, 10, 5);
  const auto other = floats(333).fill_(8);
  EXPECT_TRUE(view.eq(7).all().item<bool>());
}

}  // namespace
}  // namespace fsdp::internal
