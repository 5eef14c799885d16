// By which interfaces or address a rank's Gloo connections go. Decisions only: no c10d,
// no I/O.
#pragma once

#include "device_mesh/rendezvous/network.h"
#include "device_mesh/rendezvous/presence.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// What GLOO_SOCKET_IFNAME lists, as PyTorch reads it: "eth0,eth1"; nothing where it is
// not set or empty.
std::vector<std::string> parse_interface_list(const std::optional<std::string>& variable);

// The first address of each of `wanted`. Throws ValueError that lists `present`, all
// interfaces of this host, for one that is not there or has no address.
std::vector<std::string> addresses_of(const std::vector<std::string>& wanted,
                                      const std::vector<NetworkInterface>& present);

// The address for the rank that told `own`, where all members told `all`: its own, unless
// others on another network cannot reach that; then the one `towards` gives for one of
// theirs. Throws ValueError that names GLOO_SOCKET_IFNAME and this host's interfaces
// where there is none.
std::string gloo_address(const Presence& own, const std::vector<Presence>& all,
                         const std::function<std::string(const std::string& host)>& towards,
                         const std::vector<NetworkInterface>& present);

// Throws ValueError where the interfaces that the user named are loopback ones and other
// members are on another network.
void check_reachable(const std::vector<std::string>& interfaces, const Presence& own,
                     const std::vector<Presence>& all,
                     const std::vector<NetworkInterface>& present);

}  // namespace fsdp::internal
