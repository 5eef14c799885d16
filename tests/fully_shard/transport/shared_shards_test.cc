#include "fully_shard/transport/shared_shards.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "tests/support/errors.h"
#include "tests/support/slowdown.h"
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

// Each rank has a half of the common memory, or a third.
std::shared_ptr<SharedShards> make_shards(const DeviceMesh& mesh, int64_t bytes = kBytes,
                                          int64_t table = 0,
                                          std::chrono::milliseconds patience = 0ms) {
  const auto channel = PeerChannel::of(mesh.group(0));
  const auto impatient = std::make_shared<Patience>(Patience{.most = patience});
  return std::make_shared<SharedShards>(
      SharedShards::Options{.channel = channel,
                            .gathers = collectives_of(mesh, 0),
                            .number = channel->next_shared_number(),
                            .shards = {.bytes = mesh.size() * bytes,
                                       .own = {{mesh.rank() * bytes, bytes}},
                                       .table = table},
                            .patience = impatient});
}

// Every byte is of the rank and the number of the write.
uint8_t value_of(int64_t rank, int64_t write) { return static_cast<uint8_t>(16 * rank + write); }

at::Tensor own_part(SharedShards& shards, int64_t rank) {
  return shards.bytes().narrow(0, rank * kBytes, kBytes);
}

void write(SharedShards& shards, int64_t rank, int64_t number) {
  shards.begin_write([] { return "unit 'u'"; });
  own_part(shards, rank).fill_(value_of(rank, number));
  shards.end_write({});
}

void expect_read(SharedShards& shards, int64_t world, int64_t number) {
  auto read = shards.read("read of the shards of unit 'u'", SharedShards::ReadBy::kCopy);
  std::vector<at::Tensor> copies;
  do {
    const auto rows = read->wait();
    copies.clear();
    for (int64_t rank = 0; rank < world; ++rank)
      copies.push_back(
          at::from_blob(const_cast<char*>(rows.row(rank)) + rank * kBytes, {kBytes}, at::kByte)
              .clone());
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
      own_part(*shards, rank).fill_(value_of(rank, 0));
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
      if (rank == 1) own_part(shards, rank).fill_(value_of(rank, number));  // nobody is told
      write(shards, rank, number);
      if (rank == 0) std::this_thread::sleep_for(2ms);
      expect_read(shards, world(), number);
    }
  });
}

INSTANTIATE_WORLDS(SharedShardsOf, 2, 3);

class SharedShardsInCommon : public testing::Worlds {
 protected:
  // As SharedShardsOf, and ranks wait for one another before they write.
  void on_ranks_with(const std::function<void(int64_t rank, const DeviceMesh& mesh,
                                              SharedShards& shards)>& body) const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      const auto shards = make_shards(mesh, kBytes, /*table=*/0, testing::kSlowdown * 200ms);
      own_part(*shards, rank).fill_(value_of(rank, 0));
      shards->end_write({});
      shards->end_of_start();
      body(rank, mesh, *shards);
      collectives_of(mesh, 0).barrier("the end of the test");
    });
  }
  // What is read in place, where it can be.
  static std::unique_ptr<ReadInPlace> read(SharedShards& shards) {
    auto read = shards.read("read of the shards of unit 'u'", SharedShards::ReadBy::kInPlace);
    read->wait();
    EXPECT_TRUE(read->was_right());
    return read->in_place();
  }
  void expect_whole(const at::Tensor& whole, int64_t number) const {
    for (int64_t rank = 0; rank < world(); ++rank)
      EXPECT_TRUE(
          whole.narrow(0, rank * kBytes, kBytes).eq(value_of(rank, number)).all().item<bool>())
          << "of rank " << rank << " after write " << number;
  }
};

TEST_P(SharedShardsInCommon, AreReadWhereTheyLie) {
  on_ranks_with([&](int64_t rank, const DeviceMesh& mesh, SharedShards& shards) {
    for (int64_t number = 0; number < 5; ++number) {
      if (number > 0) write(shards, rank, number);
      {
        const auto whole = read(shards);
        ASSERT_NE(whole, nullptr);
        expect_whole(whole->bytes(), number);
      }
      shards.end_of_backward();
      collectives_of(mesh, 0).barrier("ranks that are in step");
    }
  });
}

// Whoever writes leaves them alone, however far it is ahead.
TEST_P(SharedShardsInCommon, StayAsTheyAreForARankThatReadsThem) {
  on_ranks_with([&](int64_t rank, const DeviceMesh& mesh, SharedShards& shards) {
    write(shards, rank, 1);
    auto whole = read(shards);
    ASSERT_NE(whole, nullptr);
    if (rank != 0) {
      whole.reset();
      write(shards, rank, 2);
      shards.end_of_backward();
      write(shards, rank, 3);
    }
    collectives_of(mesh, 0).barrier("all others have written");
    if (rank == 0) {
      expect_whole(whole->bytes(), 1);
      whole.reset();
      write(shards, rank, 2);
      shards.end_of_backward();
      write(shards, rank, 3);
    }
    expect_read(shards, world(), 3);
  });
}

// First one of two ranks is ahead and goes elsewhere, then the other one.
TEST_P(SharedShardsInCommon, ComeBackWhenNobodyReadsThem) {
  if (world() != 2) return;
  on_ranks_with([&](int64_t rank, const DeviceMesh& mesh, SharedShards& shards) {
    for (const int64_t ahead : {1, 0}) {
      if (rank != ahead) collectives_of(mesh, 0).barrier("one has written");
      write(shards, rank, 1 + rank);
      shards.end_of_backward();
      if (rank == ahead) collectives_of(mesh, 0).barrier("one has written");
      collectives_of(mesh, 0).barrier("both have written");
    }
    write(shards, rank, 3);
    const auto whole = read(shards);
    ASSERT_NE(whole, nullptr);
    expect_whole(whole->bytes(), 3);
  });
}

TEST_P(SharedShardsInCommon, AreCopiedFromARankWhoseAliasIsOut) {
  on_ranks_with([&](int64_t rank, const DeviceMesh& mesh, SharedShards& shards) {
    const auto before = read(shards);
    ASSERT_NE(before, nullptr);
    collectives_of(mesh, 0).barrier("all read them");
    if (rank == 1) {
      shards.give_out();
      own_part(shards, rank).fill_(value_of(rank, 1));  // nobody is told yet
    }
    collectives_of(mesh, 0).barrier("one has written them");
    expect_whole(before->bytes(), 0);
  });
}

// Between two writes either all read them or none.
TEST_P(SharedShardsInCommon, AreNotWrittenWhileARankReadsThem) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto shards = make_shards(mesh, kBytes, /*table=*/0, testing::kSlowdown * 200ms);
    own_part(*shards, rank).fill_(value_of(rank, 0));
    shards->end_write({});
    shards->end_of_start();
    write(*shards, rank, 1);
    const auto whole = rank == 0 ? read(*shards) : nullptr;
    collectives_of(mesh, 0).barrier("one rank reads");
    if (rank == 0) {
      ASSERT_NE(whole, nullptr);
      std::this_thread::sleep_for(50ms);
      return expect_whole(whole->bytes(), 1);
    }
    EXPECT_THAT(testing::message_of([&] { write(*shards, rank, 2); }),
                ::testing::AllOf(HasSubstr("unit 'u'"), HasSubstr("rank 0 has read them"),
                                 HasSubstr("rank " + std::to_string(rank))));
  });
}

INSTANTIATE_WORLDS(SharedShardsInCommon, 2, 3);

// Whoever makes the memory for all finds it when it reads.
TEST(SharedShardsThatDiffer, InSizeAreAnErrorThatNamesBoth) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto make_and_read = [&] {
      const auto shards = make_shards(mesh, kBytes + rank);
      shards->end_write({});
      shards->read("read of the shards of unit 'u'", SharedShards::ReadBy::kCopy)->wait();
    };
    EXPECT_THAT(
        testing::message_of(make_and_read),
        ::testing::AllOf(HasSubstr("other models"), HasSubstr("131072"), HasSubstr("131074")));
  });
}

TEST(SharedShardsThatDiffer, SayWhatTheyAreSaidToBe) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto shards = make_shards(mesh, kBytes, /*table=*/2);
    shards->end_write(
        {.word = static_cast<uint64_t>(7 + rank), .table = {1, 2u + static_cast<uint64_t>(rank)}});
    auto read = shards->read("read of the shards of unit 'u'", SharedShards::ReadBy::kCopy);
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
