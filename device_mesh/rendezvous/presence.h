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
// What the first rank of a host is to say where the processes of that host, with
// `threads` each, have more threads than it has `cores`: waiting threads then keep others
// from computing, and a step takes many times as long. Empty: nothing.
std::string advice_about_threads(const std::vector<Presence>& members, size_t self, int64_t threads,
                                 int64_t cores);
// "rank 3", "ranks 0, 3"; of many the first, and how many more.
std::string ranks_text(const std::vector<int64_t>& ranks);

}  // namespace fsdp::internal
