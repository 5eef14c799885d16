// A rendezvous port that another program has: the error says which, and what to do.
#include "device_mesh/process_group.h"
#include "tests/support/process_ranks.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

const testing::ChildCase kPortIsTaken("port_is_taken", [] {
  const auto here = launch_environment();
  if (here.rank != 0) return 0;
  if (!take_port(here.master_port)) return 2;
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(5)});
  return 0;
});

TEST(ProcessGroup, APortInUseIsNamedWithWhatToDo) {
  const auto ends = testing::run_processes("port_is_taken", 2, std::chrono::seconds(30));
  EXPECT_EQ(ends[0].exit_code, 1) << ends[0].output;
  EXPECT_THAT(ends[0].output,
              AllOf(HasSubstr("rank 0 can not listen at MASTER_ADDR=127.0.0.1, MASTER_PORT="),
                    HasSubstr("give every rank another MASTER_PORT")));
}

}  // namespace
}  // namespace fsdp
