// What this host knows of its network: its interfaces, by which of its addresses others
// reach it, and who takes its connections. No c10d. Local.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

struct NetworkInterface {
  std::string name;                    // "eth0"
  std::vector<std::string> addresses;  // IPv4 and IPv6, as text; none for one without
};
// Those that are up, in the system's order.
std::vector<NetworkInterface> network_interfaces();
// "lo 127.0.0.1, eth0 10.0.0.1 fd00::1"
std::string describe(const std::vector<NetworkInterface>& interfaces);

std::string host_name();
// The same text for two processes where a loopback address of the one reaches the other:
// same machine, started once, same network namespace.
std::string network_identity();

// Of an address as text or a name: "localhost", 127.0.0.0/8, ::1.
bool is_loopback(const std::string& host);

// The four below ask the resolver, and take as long as that one does (deadline.h).

// Why `host`, a name or an address, does not resolve; empty where it does.
std::string resolve_error(const std::string& host);
// Whether something at `host`, a name or an address, takes connections to `port`. Takes
// minutes where nothing says yes or no.
bool accepts_connections(const std::string& host, int64_t port);
// The address, of those that this host's own name resolves to, that is one of its
// interfaces' and no loopback one; empty where there is none.
std::string address_of_own_name();
// The address of this host from which packets to `host` leave; empty where it does not
// resolve or there is no way.
std::string address_towards(const std::string& host);

}  // namespace fsdp::internal
