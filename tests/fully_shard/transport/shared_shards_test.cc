#include "fully_shard/transport/shared_shards.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace fsdp::internal {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 1 << 16;

std::shared_ptr<SharedShards> make_shards(const DeviceMesh& mesh, int64_t bytes = kBytes,
                                          int64_t table = 0) {
  const auto channel = PeerChannel::of(mesh.group(0));
  const auto impatient = std::make_shared<Patience>(Patience{.most = 0ms});
  return std::make_shared<SharedShards>(
      SharedShards::Options{.channel = channel,
                            .gathers = collectives_of(mesh, 0),
                            .number = channel->next_shared_number(),
                            .bytes = bytes,
                            .table = table,
                            .patience = impatient});
}

// Every byte is of the rank and the number of the write.
uint8_t value_of(int64_t rank, int64_t write) { return static_cast<uint8_t>(16 * rank + write); }

void write(SharedShards& shards, int64_t rank, int64_t number) {
  shards.begin_write();
  shards.bytes().fill_(value_of(rank, number));
  shards.end_write({});
}

void expect_read(SharedShards& shards, int64_t world, int64_t number) {
  auto read = shards.read("read of the shards of unit 'u'");
  std::vector<at::Tensor> copies;
  do {
    const auto rows = read->wait();
    copies.clear();
    for (int64_t rank = 0; rank < world; ++rank)
      copies.push_back(
          at::from_blob(const_cast<char*>(rows.row(rank)), {kBytes}, at::kByte).clone());
  } while (!read->was_right());
  for (int64_t rank = 0; rank < world; ++rank)
    EXPECT_TRUE(copies[static_cast<size_t>(rank)].eq(value_of(rank, number)).all().item<bool>())
        << "of rank " << rank << " after write " << number;
}

class SharedShardsOf : public testing::Worlds {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "readers copy what may be written meanwhile, and find out afterwards";
#endif
  }

  // What each rank does, with shards that it has written once.
  void on_ranks_with(const std::function<void(int64_t rank, SharedShards& shards)>& body) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      const auto shards = make_shards(mesh);
      shards->bytes().fill_(value_of(rank, 0));
      shards->end_write({});
      shards->end_of_start();
      body(rank, *shards);
      collectives_of(mesh, 0).barrier("the end of the test");
    });
  }
};

// Writers do not wait, so readers that come late read what was kept for them.
TEST_P(SharedShardsOf, ARankReadsItsVersionHoweverLateItComes) {
  on_ranks_with([&](int64_t rank, SharedShards& shards) {
    std::mt19937 random(static_cast<uint32_t>(rank + 1));
    for (int64_t number = 1; number < 16; ++number) {
      write(shards, rank, number);
      if (random() % 3 == 0) std::this_thread::sleep_for(2ms);
      expect_read(shards, world(), number);
    }
  });
}

// Three runs of writes that it has not read, and has written itself by the time it reads.
TEST_P(SharedShardsOf, ARankMayBeRunsBehind) {
  on_ranks_with([&](int64_t rank, SharedShards& shards) {
    if (rank == 0) std::this_thread::sleep_for(20ms);
    for (int64_t number = 1; number < 9; ++number) {
      if (rank == 0) expect_read(shards, world(), number - 1);
      write(shards, rank, number);
      shards.end_of_backward();
    }
    expect_read(shards, world(), 8);
  });
}

TEST_P(SharedShardsOf, ARankWhoseAliasIsOutPublishesCopies) {
  on_ranks_with([&](int64_t rank, SharedShards& shards) {
    if (rank == 1) shards.give_out();
    for (int64_t number = 1; number < 8; ++number) {
      if (rank == 1) shards.bytes().fill_(value_of(rank, number));  // nobody is told
      write(shards, rank, number);
      if (rank == 0) std::this_thread::sleep_for(2ms);
      expect_read(shards, world(), number);
    }
  });
}

INSTANTIATE_WORLDS(SharedShardsOf, 2, 3);

TEST(SharedShardsThatDiffer, InSizeAreAnErrorThatNamesBoth) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto shards = make_shards(mesh, kBytes + rank);
    shards->end_write({});
    EXPECT_THAT(
        testing::message_of([&] { shards->read("read of the shards of unit 'u'")->wait(); }),
        ::testing::AllOf(HasSubstr("other models"), HasSubstr("65536"), HasSubstr("65537")));
  });
}

TEST(SharedShardsThatDiffer, SayWhatTheyAreSaidToBe) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto shards = make_shards(mesh, kBytes, /*table=*/2);
    shards->end_write(
        {.word = static_cast<uint64_t>(7 + rank), .table = {1, 2u + static_cast<uint64_t>(rank)}});
    auto read = shards->read("read of the shards of unit 'u'");
    const auto rows = read->wait();
    EXPECT_EQ(rows.words()[static_cast<size_t>(1 - rank)].agreement,
              static_cast<uint64_t>(8 - rank));
    EXPECT_TRUE(read->was_right());
    const auto& tables = read->other_tables();
    EXPECT_TRUE(tables[static_cast<size_t>(rank)].empty());
    EXPECT_EQ(tables[static_cast<size_t>(1 - rank)],
              (std::vector<uint64_t>{1, 3u - static_cast<uint64_t>(rank)}));
    collectives_of(mesh, 0).barrier("the end of the test");
  });
}

}  // namespace
}  // namespace fsdp::internal
