// What a rank tells the others of itself when a process group is made: where it runs. No
// c10d, no I/O.
#pragma once

#include <cstdint>
#include <map>
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
// "rank 3", "ranks 0, 3"; of many the first, and how many more.
std::string ranks_text(const std::vector<int64_t>& ranks);

}  // namespace fsdp::internal
