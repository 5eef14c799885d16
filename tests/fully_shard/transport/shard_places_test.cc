// How long a rank is waited for that may not come.
#include "fully_shard/transport/shard_places.h"

#include "device_mesh/peer_memory/peer_channel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace fsdp::internal {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

// Two ranks that share memory, in one process.
class PatienceOf : public ::testing::Test {
 protected:
  PatienceOf() {
    for (int64_t rank = 0; rank < 2; ++rank)
      memories_.push_back(std::make_shared<PeerMemory>(rank, 2));
    memories_[0]->meet(1, memories_[1]->invitation());
    memories_[1]->meet(0, memories_[0]->invitation());
  }

  PeerChannel channel_of(int64_t rank) const {
    return PeerChannel(
        {.memory = memories_[static_cast<size_t>(rank)], .id = 5, .ranks = {0, 1}, .timeout = 60s});
  }
  PeerMemory& memory(size_t rank) const { return *memories_[rank]; }

 private:
  std::vector<std::shared_ptr<PeerMemory>> memories_;
};

TEST_F(PatienceOf, EndsWhenItsTimeIsUpAndIsNotTriedAgain) {
  Patience patience{.most = 100ms};
  const auto begin = steady_clock::now();
  EXPECT_FALSE(patience.await(channel_of(0), [] { return false; }));
  EXPECT_GE(steady_clock::now() - begin, 100ms);
  EXPECT_TRUE(patience.was_in_vain);
  int64_t looks = 0;
  EXPECT_FALSE(patience.await(channel_of(0), [&looks] { return ++looks > 1; }));
  EXPECT_TRUE(patience.await(channel_of(0), [] { return true; }));
  EXPECT_FALSE(patience.was_in_vain);
}

// A rank that is gone does not come: half a second for each wait of this kind would add
// up.
TEST_F(PatienceOf, EndsWhenARankIsGone) {
  Patience patience{.most = 60s};
  std::thread other([this] {
    std::this_thread::sleep_for(50ms);
    memory(1).leave();
  });
  const auto begin = steady_clock::now();
  EXPECT_FALSE(patience.await(channel_of(0), [] { return false; }));
  EXPECT_LT(steady_clock::now() - begin, 20s);
  other.join();
}

TEST_F(PatienceOf, IsRewardedByWhatARankDidBeforeItWasGone) {
  memory(1).leave();
  Patience patience{.most = 60s};
  int64_t looks = 0;  // the first one is before the wait
  EXPECT_TRUE(patience.await(channel_of(0), [&looks] { return ++looks > 2; }));
}

}  // namespace
}  // namespace fsdp::internal
