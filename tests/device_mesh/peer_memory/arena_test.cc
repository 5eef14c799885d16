#include "device_mesh/peer_memory/arena.h"

#include "tests/support/errors.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

namespace fsdp::internal {
namespace {

std::shared_ptr<Arena> make_arena() {
  return std::make_shared<Arena>([](const SegmentName&) {});
}

TEST(Arena, GivesAlignedMemoryThatKnowsWhereItLies) {
  const auto arena = make_arena();
  for (const int64_t bytes : {1, 63, 64, 1000, 1 << 20, 5 << 20}) {
    const auto memory = arena->memory(bytes);
    EXPECT_EQ(memory.numel(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 64, 0);
    memory.fill_(7);
    const auto lent = Arena::lent_by(memory);
    ASSERT_TRUE(lent);
    EXPECT_EQ(lent->arena, arena.get());
    EXPECT_EQ(lent->offset, 0);
    EXPECT_EQ(Arena::lent_by(memory.narrow(0, bytes / 2, 1))->offset, bytes / 2);
  }
  EXPECT_FALSE(Arena::lent_by(at::zeros({3})));
}

TEST(Arena, MemoryThatIsReadIsNotGivenAgain) {
  const auto arena = make_arena();
  auto memory = arena->memory(1000);
  const auto* const first = memory.const_data_ptr();
  auto* const header = Arena::lent_by(memory)->header;
  header->readers = 2;
  memory.reset();
  EXPECT_NE(arena->memory(1000).const_data_ptr(), first);
  header->readers = 1;
  EXPECT_NE(arena->memory(1000).const_data_ptr(), first);
  header->readers = 0;
  const auto one = arena->memory(1000), other = arena->memory(1000);
  EXPECT_TRUE(one.const_data_ptr() == first || other.const_data_ptr() == first);
}

TEST(Arena, TellsOfEachSegmentBeforeItsBlocks) {
  std::vector<SegmentName> told;
  const auto arena =
      std::make_shared<Arena>([&](const SegmentName& name) { told.push_back(name); });
  EXPECT_TRUE(told.empty()) << "memory is made when it is needed";
  const auto small = arena->memory(100), large = arena->memory(3 << 20);
  ASSERT_EQ(told.size(), 2);
  EXPECT_GE(told[1].bytes, 3 << 20);
  EXPECT_EQ(Arena::lent_by(large)->block.segment(), 1);
}

TEST(Arena, SaysWhatItHasAndWhatItNeedsWhereThereIsNoMore) {
  const auto arena = make_arena();
  const auto small = arena->memory(100);
  constexpr int64_t kTooMuch = int64_t{1} << 50;
  const auto text = testing::message_of([&] { arena->memory(kTooMuch); });
  rlimit of_files{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &of_files), 0);
  const bool is_limited = of_files.rlim_cur < rlim_t{kTooMuch};  // ulimit -f: met before the map
  const auto* const reason = is_limited ? "the limit of file sizes" : "can not be mapped";
  EXPECT_NE(text.find(reason), std::string::npos) << text;
  EXPECT_NE(text.find("shares 1048576 bytes"), std::string::npos) << text;
  EXPECT_NE(text.find("FSDP_PEER_MEMORY=off"), std::string::npos) << text;
  arena->memory(100).fill_(1);  // and goes on
}

TEST(Arena, TensorsOutliveIt) {
  auto arena = make_arena();
  auto memory = arena->memory(100);
  arena.reset();
  memory.fill_(3);
  EXPECT_EQ(memory.sum().item<int64_t>(), 300);
}

}  // namespace
}  // namespace fsdp::internal
