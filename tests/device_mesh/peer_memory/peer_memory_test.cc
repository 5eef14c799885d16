#include "device_mesh/peer_memory/peer_memory.h"

#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/peer_memory/shared_segment.h"
#include "tests/support/errors.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using Memories = std::vector<std::shared_ptr<PeerMemory>>;

Memories met(int64_t ranks) {
  Memories all;
  for (int64_t rank = 0; rank < ranks; ++rank)
    all.push_back(std::make_shared<PeerMemory>(rank, ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t other = 0; other < ranks; ++other) {
      if (other != rank) all[rank]->meet(other, all[other]->invitation());
    }
  }
  return all;
}

NoticeBytes notice_of(char letter) {
  NoticeBytes notice{};
  notice.fill(letter);
  return notice;
}

at::Tensor bytes_of(int64_t count, int value) { return at::full({count}, value, at::kByte); }

TEST(PeerMemory, AMessageArrivesOnceWithItsNoticeAndBytes) {
  const auto ranks = met(2);
  EXPECT_FALSE(ranks[1]->peer(0).take(5, 0));
  ranks[0]->peer(1).send(
      {.channel = 5, .notice = notice_of('a'), .body = ranks[0]->as_sent(bytes_of(9, 3))});
  EXPECT_TRUE(ranks[1]->peer(0).has_come(5, 0));
  const auto message = ranks[1]->peer(0).take(5, 0);
  ASSERT_TRUE(message);
  EXPECT_EQ(message->notice, notice_of('a'));
  EXPECT_TRUE(at::equal(message->body, bytes_of(9, 3)));
  EXPECT_FALSE(ranks[1]->peer(0).take(5, 0));
}

TEST(PeerMemory, MessagesAreTakenByChannelAndNumberInAnyOrder) {
  const auto ranks = met(3);
  for (const uint64_t number : {0, 1, 2}) {
    for (const uint64_t channel : {7, 8})
      ranks[2]->peer(0).send({.channel = channel,
                              .number = number,
                              .notice = notice_of(static_cast<char>(10 * channel + number))});
  }
  for (const uint64_t number : {2, 0, 1}) {
    for (const uint64_t channel : {8, 7}) {
      const auto message = ranks[0]->peer(2).take(channel, number);
      ASSERT_TRUE(message);
      EXPECT_EQ(message->notice, notice_of(static_cast<char>(10 * channel + number)));
      EXPECT_FALSE(message->body.defined());
    }
  }
  EXPECT_FALSE(ranks[0]->peer(1).take(7, 0)) << "from another rank";
}

TEST(PeerMemory, MemoryOfItsOwnIsSentWithoutACopy) {
  const auto ranks = met(2);
  const auto rows = ranks[0]->memory(4096).view({2, 2048});
  rows.select(0, 1).fill_(9);
  EXPECT_TRUE(ranks[0]->as_sent(rows).is_same(rows));
  ranks[0]->peer(1).send({.body = rows.select(0, 1)});
  const auto message = ranks[1]->peer(0).take(0, 0);
  EXPECT_EQ(message->body.const_data_ptr(), rows.select(0, 1).const_data_ptr())
      << "ranks of one process map it once";
}

TEST(PeerMemory, WhatIsReadKeepsItsBytesWhileTheSenderGoesOn) {
  const auto ranks = met(2);
  std::vector<at::Tensor> read;
  for (int i = 0; i < 200; ++i) {
    auto rows = ranks[0]->memory(1000);
    rows.fill_(i);
    ranks[0]->peer(1).send({.number = static_cast<uint64_t>(i), .body = rows});
    rows.reset();
    read.push_back(ranks[1]->peer(0).take(0, static_cast<uint64_t>(i))->body);
    if (i >= 50) read[i - 50].reset();
  }
  for (int i = 150; i < 200; ++i) EXPECT_TRUE(at::equal(read[i], bytes_of(1000, i))) << i;
}

TEST(PeerMemory, MemoryOfMessagesIsUsedAgain) {
  const auto ranks = met(2);
  std::vector<const void*> places;
  for (uint64_t i = 0; i < 1000; ++i) {
    const auto rows = ranks[0]->memory(10000);
    places.push_back(rows.const_data_ptr());
    ranks[0]->peer(1).send({.number = i, .body = rows});
    ASSERT_TRUE(ranks[1]->peer(0).take(0, i));
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  EXPECT_LE(places.size(), 4);
}

// Not even what a message is made of.
TEST(PeerMemory, MessagesThatWereReadLeaveNothing) {
  const auto ranks = met(2);
  const auto told_of_memory = [&] {
    return testing::message_of([&] { ranks[0]->memory(int64_t{1} << 50); });
  };
  const auto pass = [&](uint64_t number) {
    ranks[0]->peer(1).send({.number = number});
    return ranks[1]->peer(0).take(0, number).has_value();
  };
  ASSERT_TRUE(pass(0));
  const std::string before = told_of_memory();
  EXPECT_NE(before.find("this rank shares "), std::string::npos) << before;
  for (uint64_t i = 1; i < 50'000; ++i) ASSERT_TRUE(pass(i));
  EXPECT_EQ(told_of_memory(), before);
}

TEST(PeerMemory, BothSendAtOnceFromSeveralThreads) {
  const auto ranks = met(2);
  constexpr uint64_t kMessages = 2000;
  const auto send = [&](int64_t from, uint64_t channel) {
    for (uint64_t i = 0; i < kMessages; ++i)
      ranks[from]->peer(1 - from).send(
          {.channel = channel,
           .number = i,
           .body = ranks[from]->as_sent(bytes_of(8 + i % 100, static_cast<int>(i % 251)))});
  };
  const auto receive = [&](int64_t from, uint64_t channel) {
    for (uint64_t i = 0; i < kMessages; ++i) {
      auto message = ranks[1 - from]->peer(from).take(channel, i);
      for (int64_t round = 0; !message; ++round) {
        ranks[1 - from]->wait_round(
            round, [&] { return ranks[1 - from]->peer(from).has_come(channel, i); });
        message = ranks[1 - from]->peer(from).take(channel, i);
      }
      EXPECT_TRUE(at::equal(message->body, bytes_of(8 + i % 100, static_cast<int>(i % 251))));
    }
  };
  std::vector<std::thread> threads;
  for (const int64_t from : {0, 1}) {
    for (const uint64_t channel : {1, 2}) {
      threads.emplace_back(send, from, channel);
      threads.emplace_back(receive, from, channel);
    }
  }
  for (auto& thread : threads) thread.join();
}

TEST(PeerMemory, ASleeperWakesWhenAMessageComes) {
  const auto ranks = met(2);
  std::thread sender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ranks[0]->peer(1).send({});
  });
  int64_t round = 1'000'000;  // sleeps at once
  while (!ranks[1]->peer(0).take(0, 0))
    ranks[1]->wait_round(round++, [&] { return ranks[1]->peer(0).has_come(0, 0); });
  EXPECT_LT(round, 1'000'000 + 1000) << "it spun";
  sender.join();
}

TEST(PeerMemory, WhoLeavesIsNamedAfterWhatItSentWasTaken) {
  const auto ranks = met(2);
  EXPECT_EQ(ranks[1]->peer(0).why_gone(), "");
  ranks[0]->peer(1).send({.body = ranks[0]->as_sent(bytes_of(10, 4))});
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(at::equal(ranks[1]->peer(0).take(0, 0)->body, bytes_of(10, 4)));
  });
  ranks[0]->leave();
  reader.join();
  EXPECT_EQ(ranks[1]->peer(0).why_gone(), "rank 0 has left: it destroyed its process group");
  EXPECT_FALSE(ranks[1]->peer(0).take(0, 1));
}

TEST(PeerMemory, LeavingWaitsForReadersAndNotForThoseWhoHaveLeft) {
  const auto ranks = met(2);
  ranks[0]->peer(1).send({.body = ranks[0]->as_sent(bytes_of(10, 4))});
  const auto begin = std::chrono::steady_clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ranks[1]->leave();  // without having read it
  });
  ranks[0]->leave();
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, std::chrono::milliseconds(90));
  EXPECT_LT(took, std::chrono::milliseconds(1500));
  other.join();
}

// Rank 0 of three, in a process of its own, which does `last` once it has met rank 1,
// this process's.
class OtherProcess {
 public:
  explicit OtherProcess(const std::function<void(const std::shared_ptr<PeerMemory>&)>& last)
      : memory_(std::make_shared<PeerMemory>(1, 3)) {
    std::array<int, 2> to_child{}, to_parent{};
    EXPECT_EQ(pipe(to_child.data()) + pipe(to_parent.data()), 0);
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) be_child(to_child[0], to_parent[1], last);
    std::array<char, 4096> text{};
    EXPECT_GT(read(to_parent[0], text.data(), text.size() - 1), 0);
    memory_->meet(0, text.data());
    EXPECT_EQ(write(to_child[1], "x", 1), 1);
    for (const int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(fd);
  }
  ~OtherProcess() { await_end(); }
  OtherProcess(const OtherProcess&) = delete;

  const std::shared_ptr<PeerMemory>& memory() const { return memory_; }
  std::string name() const { return "rank 0 has ended (process " + std::to_string(pid_) + ")"; }
  void await_end() {
    if (!std::exchange(has_ended_, true)) waitpid(pid_, nullptr, 0);
  }
  bool ends_within(std::chrono::milliseconds limit) {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!has_ended_ && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      has_ended_ = waitpid(pid_, nullptr, WNOHANG) == pid_;
    }
    return has_ended_;
  }

 private:
  [[noreturn]] void be_child(int from_parent, int to_parent,
                             const std::function<void(const std::shared_ptr<PeerMemory>&)>& last) {
    const auto own = std::make_shared<PeerMemory>(0, 3);
    own->meet(1, memory_->invitation());
    const auto& invitation = own->invitation();
    char met = 0;
    if (write(to_parent, invitation.data(), invitation.size()) > 0 &&
        read(from_parent, &met, 1) == 1)
      last(own);
    _exit(0);
  }

  const std::shared_ptr<PeerMemory> memory_;
  pid_t pid_ = 0;
  bool has_ended_ = false;
};

void send_in_a_new_segment(PeerMemory& from) {
  from.peer(1).send({.body = from.as_sent(bytes_of(5 << 20, 4))});
}

TEST(PeerMemory, WhatAProcessThatIsGoneHadSentIsAnErrorThatNamesIt) {
  OtherProcess other([](const auto& own) { send_in_a_new_segment(*own); });
  other.await_end();
  EXPECT_EQ(testing::message_of([&] { other.memory()->peer(0).take(0, 0); }),
            other.name() + ", and what this rank had not read yet went with it");
}

TEST(PeerMemory, AProgramThatEndsWaitsUntilWhatItSentWasTaken) {
  OtherProcess other([](const auto& own) {
    PeerMemory::leave_at_exit(own);
    send_in_a_new_segment(*own);
    std::exit(0);
  });
  while (other.memory()->peer(0).why_gone().empty())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_FALSE(other.ends_within(std::chrono::milliseconds(700)));
  const auto message = other.memory()->peer(0).take(0, 0);
  ASSERT_TRUE(message);
  EXPECT_TRUE(at::equal(message->body, bytes_of(5 << 20, 4)));
  EXPECT_EQ(other.memory()->peer(0).why_gone(), other.name());
}

TEST(PeerMemory, AFailureIsToldInItsChannel) {
  const auto ranks = met(2);
  ranks[0]->peer(1).send({.channel = 7});
  ranks[0]->peer(1).send_failure(7, "no disk");
  EXPECT_EQ(ranks[1]->peer(0).failure_in(7), "no disk");
  EXPECT_EQ(ranks[1]->peer(0).failure_in(7), "no disk") << "it stays";
  EXPECT_EQ(ranks[1]->peer(0).failure_in(8), "");
  EXPECT_TRUE(ranks[1]->peer(0).take(7, 0)) << "what was sent before is there";
}

// What a wait for the first message of rank `from` in channel 7 throws.
std::string error_of_wait(const std::shared_ptr<PeerMemory>& own, int64_t from) {
  const auto wait = c10::make_intrusive<PeerReceive>(
      PeerWait::Options{
          .memory = own, .from = from, .channel = 7, .timeout = std::chrono::seconds(60)},
      /*number=*/0);
  return testing::message_of([&] { wait->wait(std::chrono::milliseconds(0)); });
}

TEST(PeerMemory, WhoHasFailedAndLeftIsNamedWithItsFailure) {
  const auto ranks = met(2);
  ranks[0]->peer(1).send_failure(7, "no disk");
  std::thread leaves([&] { ranks[0]->leave(); });
  while (ranks[1]->peer(0).why_gone().empty())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(error_of_wait(ranks[1], /*from=*/0), "rank 0 has failed before: no disk");
  leaves.join();
}

TEST(PeerMemory, WhoHasLeftIsNamedWithThoseWhoHaveEnded) {
  OtherProcess other([](const auto&) {});
  const auto left = std::make_shared<PeerMemory>(2, 3);
  left->meet(1, other.memory()->invitation());
  other.memory()->meet(2, left->invitation());
  other.await_end();
  left->leave();
  EXPECT_EQ(error_of_wait(other.memory(), /*from=*/2),
            "rank 2 has left: it destroyed its process group; " + other.name());
  EXPECT_EQ(error_of_wait(other.memory(), /*from=*/0), other.name());
}

TEST(PeerMemory, OnlyRanksOfOneHostAreInvited) {
  const PeerMemory here(0, 2), beside(1, 2);
  EXPECT_TRUE(PeerMemory::are_of_one_host(here.invitation(), beside.invitation()));
  EXPECT_FALSE(PeerMemory::are_of_one_host(here.invitation(), ""));
  EXPECT_FALSE(PeerMemory::are_of_one_host("", ""));
  EXPECT_FALSE(PeerMemory::are_of_one_host(here.invitation(), "x" + beside.invitation()));
}

TEST(SharedSegment, WhatLiesThereUnderANumberUsedAgainIsRefused) {
  const auto segment = SharedSegment::create(1 << 16);
  auto name = segment->name();
  EXPECT_EQ(SharedSegment::open(name), segment);
  name.mark += 2;
  EXPECT_NE(testing::message_of([&] { SharedSegment::open(name); }).find("is gone"),
            std::string::npos);
}

TEST(SharedSegment, ASegmentOfAnotherProcessIsTheSameMemory) {
  int to_child[2], to_parent[2];
  ASSERT_EQ(pipe(to_child) + pipe(to_parent), 0);
  const auto segment = SharedSegment::create(1 << 16);
  const auto child = fork();
  if (child == 0) {  // opens what its parent has, as if it were anybody
    const auto opened = SharedSegment::open(segment->name());
    opened->data()[4096] = 42;
    auto wrong = segment->name();
    wrong.mark ^= 2;
    const auto text = testing::message_of([&] { SharedSegment::open(wrong); });
    _exit(opened != segment && text.find("is not the memory") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(segment->data()[4096], 42);
}

}  // namespace
}  // namespace fsdp::internal
