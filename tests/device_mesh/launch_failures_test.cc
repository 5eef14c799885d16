// What processes are told when a job does not come together: who is missing, and what to
// look at. All of them, in time.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "tests/support/process_ranks.h"

#include <arpa/inet.h>
#include <c10/util/Logging.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace fsdp {
namespace {

using ::testing::AllOf;
using testing::ChildCase;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_processes;

int64_t own_index() { return std::atoll(std::getenv("LOCAL_RANK")); }

void set(const char* name, const char* value) { setenv(name, value, /*overwrite=*/1); }

int join(std::chrono::milliseconds timeout) {
  init_process_group({.backend = "gloo", .timeout = timeout});
  destroy_process_group();
  std::printf("met\n");
  return 0;
}

// Those of `ends` ended by themselves with exit code 1 and such a text.
template <class Matcher>
void expect_told(const std::vector<testing::ProcessEnd>& ends, const std::vector<size_t>& which,
                 const Matcher& matcher) {
  for (const auto i : which) {
    EXPECT_FALSE(ends[i].killed_at_deadline) << i;
    EXPECT_EQ(ends[i].exit_code, 1) << i;
    EXPECT_THAT(ends[i].output, matcher) << i;
  }
}

constexpr auto kMuchLonger = std::chrono::seconds(100);

const ChildCase kOneIsMissing("one_is_missing", [] {
  if (own_index() == 2) return 0;
  return join(own_index() == 0 ? std::chrono::seconds(5) : kMuchLonger);
});

TEST(Launch, AMissingRankIsNamedToAllThatCame) {
  const auto ends = run_processes("one_is_missing", 3, std::chrono::seconds(40));
  expect_told(ends, {0, 1},
              AllOf(HasSubstr("rank 2 has not come within"), HasSubstr("there are: rank 0 (pid "),
                    HasSubstr("rank 1 (pid "), HasSubstr("WORLD_SIZE=3"),
                    HasSubstr("MASTER_ADDR=127.0.0.1, MASTER_PORT=")));
}

const ChildCase kTwoOfOneRank("two_of_one_rank", [] {
  if (own_index() == 2) set("RANK", "1");
  return join(kMuchLonger);
});

TEST(Launch, TwoProcessesOfOneRankAreTold) {
  const auto ends = run_processes("two_of_one_rank", 3, std::chrono::seconds(40));
  expect_told(ends, {0, 1, 2},
              AllOf(HasSubstr("rank 1: two processes have come as this rank: pid "),
                    HasSubstr("Look how RANK is set")));
}

const ChildCase kOtherWorldSize("other_world_size", [] {
  if (own_index() == 1) set("WORLD_SIZE", "3");
  return join(kMuchLonger);
});

TEST(Launch, AnotherWorldSizeIsTold) {
  const auto ends = run_processes("other_world_size", 2, std::chrono::seconds(40));
  expect_told(ends, {0, 1}, AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("WORLD_SIZE=3")));
}

const ChildCase kNameDoesNotResolve("name_does_not_resolve", [] {
  set("MASTER_ADDR", "no-such-host.invalid");
  return join(std::chrono::seconds(1));
});

TEST(Launch, AMasterAddressThatDoesNotResolveIsToldAsThat) {
  const auto ends = run_processes("name_does_not_resolve", 2, std::chrono::seconds(60));
  expect_told(ends, {0, 1},
              AllOf(HasSubstr("can not resolve MASTER_ADDR=no-such-host.invalid"),
                    Not(HasSubstr("another program has the port"))));
}

// Takes the port as rank 0 would, and never says anything.
int listen_in_silence() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(launch_environment().master_port));
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return 2;
  if (listen(listener, 5) != 0) return 2;
  const int connection = accept(listener, nullptr, nullptr);
  std::array<char, 4096> heard{};
  while (read(connection, heard.data(), heard.size()) > 0) continue;  // until the other ends
  return 0;
}

const ChildCase kSilentPort("silent_port", [] {
  return own_index() == 0 ? listen_in_silence() : join(std::chrono::seconds(1));
});

TEST(Launch, APortHeldBySomethingSilentEndsInTheTimeout) {
  const auto ends = run_processes("silent_port", 2, std::chrono::seconds(40));
  EXPECT_EQ(ends[0].exit_code, 0);
  expect_told(ends, {1},
              AllOf(HasSubstr("rank 1 on host '"), HasSubstr("what listens there has said nothing"),
                    HasSubstr("Give every rank another MASTER_PORT")));
}

// Until rank 1 has come to the store that this process serves.
void await_rank_one() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch_environment().master_port);
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  while (!store->check({"attempt_0/world/1/present/1"}))
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// Rank 2 never comes.
const ChildCase kServingRankEnds("serving_rank_ends", [] {
  if (own_index() == 2) return 0;
  if (own_index() == 1) return join(kMuchLonger);
  std::thread([] { join(kMuchLonger); }).detach();
  await_rank_one();
  std::_Exit(42);
});

TEST(Launch, TheEndOfTheServingRankEndsThoseThatWait) {
  const auto ends = run_processes("serving_rank_ends", 3, std::chrono::seconds(60));
  EXPECT_EQ(ends[0].exit_code, 42);
  expect_told(ends, {1},
              HasSubstr("the rank that serves the store, as a rule rank 0, has ended (its own "
                        "output tells why)"));
}

const ChildCase kWrongInterface("wrong_interface", [] {
  if (own_index() == 1) set("GLOO_SOCKET_IFNAME", "eth99");
  return join(kMuchLonger);
});

TEST(Launch, AWrongInterfaceIsToldToAllWithThoseThatThereAre) {
  const auto ends = run_processes("wrong_interface", 2, std::chrono::seconds(40));
  expect_told(ends, {0, 1},
              AllOf(HasSubstr("rank 1: GLOO_SOCKET_IFNAME names the network interface 'eth99'"),
                    HasSubstr("it has: "), HasSubstr("lo 127.0.0.1")));
}

const ChildCase kJoins("joins", [] { return join(std::chrono::seconds(30)); });

TEST(Launch, InterfacesMayBeAListOrEmpty) {
  for (const auto* interfaces : {"lo,lo", ""}) {
    const auto ends =
        run_processes("joins", 2, std::chrono::seconds(40), {{"GLOO_SOCKET_IFNAME", interfaces}});
    for (const auto& end : ends) EXPECT_EQ(end.output, "met\n") << interfaces;
  }
}

const ChildCase kWritesToAClosedPipe("writes_to_a_closed_pipe", [] {
  if (own_index() == 1) std::signal(SIGPIPE, [](int) { std::_Exit(7); });
  init_process_group({.backend = "fake", .rank = 0, .world_size = 1});
  std::raise(SIGPIPE);
  return 0;
});

TEST(Launch, APeerThatIsGoneIsNoSilentDeathAndAHandlerOfTheUsersStays) {
  const auto ends = run_processes("writes_to_a_closed_pipe", 2, std::chrono::seconds(40));
  EXPECT_EQ(ends[0].exit_code, 0);
  EXPECT_EQ(ends[1].exit_code, 7);
}

const ChildCase kWarns("warns", [] {
  init_process_group({.backend = "fake", .rank = 0, .world_size = 1});
  LOG(WARNING) << "a warning";
  return 0;
});

TEST(Launch, LibTorchsLogLevelIsHeeded) {
  const auto warned = [](const char* level) {
    return run_processes("warns", 1, std::chrono::seconds(40), {{"TORCH_CPP_LOG_LEVEL", level}})[0]
        .output;
  };
  EXPECT_THAT(warned("WARNING"), HasSubstr("a warning"));
  EXPECT_EQ(warned("ERROR"), "");
}

// Listens at the port until the process ends.
bool take_port(int64_t port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
         listen(listener, 1) == 0;
}

const ChildCase kPortIsTaken("port_is_taken", [] {
  const auto here = launch_environment();
  if (here.rank != 0) return 0;
  if (!take_port(here.master_port)) return 2;
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(5)});
  return 0;
});

TEST(ProcessGroup, APortInUseIsNamedWithWhatToDo) {
  const auto ends = run_processes("port_is_taken", 2, std::chrono::seconds(30));
  EXPECT_EQ(ends[0].exit_code, 1) << ends[0].output;
  EXPECT_THAT(ends[0].output,
              AllOf(HasSubstr("rank 0 can not listen at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
                    HasSubstr("give every rank another MASTER_PORT")));
}

}  // namespace
}  // namespace fsdp
