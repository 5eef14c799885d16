// Who takes this host's connections, asked of its own loopback interface.
#include "device_mesh/rendezvous/network.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

namespace fsdp::internal {
namespace {

// A port of 127.0.0.1 that is taken, and listened at only where a test asks for that.
class TakenPort {
 public:
  TakenPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_, any, length), 0);
    EXPECT_EQ(getsockname(socket_, any, &length), 0);
    port_ = ntohs(address.sin_port);
  }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  ~TakenPort() { close(socket_); }

  void start_to_listen() const { EXPECT_EQ(listen(socket_, 5), 0); }
  int64_t number() const { return port_; }

 private:
  int socket_;
  int64_t port_ = 0;
};

TEST(Network, WhatListensInSilenceTakesConnections) {
  const TakenPort port;
  port.start_to_listen();
  EXPECT_TRUE(accepts_connections("127.0.0.1", port.number()));
  EXPECT_TRUE(accepts_connections("localhost", port.number()));
}

TEST(Network, APortWithoutAListenerTakesNone) {
  const TakenPort port;
  EXPECT_FALSE(accepts_connections("127.0.0.1", port.number()));
}

}  // namespace
}  // namespace fsdp::internal
