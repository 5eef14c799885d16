// What a rank tells the others of itself when a process group is made: where it runs. And
// what follows from what all told: by which address each connects, and whether their
// threads are too many. Decisions only: no c10d, no I/O.
#pragma once

#include "device_mesh/rendezvous/network.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

struct Presence {
  std::string host;  // its name, for messages
  int64_t pid = 0;
  std::string network = {};  // network_identity()
  std::string address = {};  // by which it would be reached; empty where not asked
  std::string memory = {};   // PeerMeeting::invitation()
};

std::string to_text(const Presence& presence);
Presence parse_presence(const std::string& text);

// "pid 12 on host 'node0'"
std::string describe(const Presence& presence);
// "rank 0 (pid 12 on host 'node0'), rank 3 (...)"; of many the first, and how many more.
std::string describe(const std::map<int64_t, Presence>& by_rank);
// What the first rank of a host is to say where the processes of that host, with
// `threads` each, have more threads than it has `cores`: waiting threads then keep others
// from computing, and a step takes many times as long. Empty: nothing.
std::string advice_about_threads(const std::vector<Presence>& members, size_t self, int64_t threads,
                                 int64_t cores);
// "rank 3", "ranks 0, 3"; of many the first, and how many more.
std::string ranks_text(const std::vector<int64_t>& ranks);

// By which interfaces or address a rank's Gloo connections go.

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
