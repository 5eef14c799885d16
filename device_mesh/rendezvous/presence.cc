#include "device_mesh/rendezvous/presence.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace fsdp::internal {
namespace {

constexpr size_t kNamed = 16;  // of a list; a message is read by people

std::string and_more(size_t count) {
  return count > kNamed ? " and " + std::to_string(count - kNamed) + " more" : "";
}

}  // namespace

std::string to_text(const Presence& presence) {
  return presence.host + "\n" + std::to_string(presence.pid) + "\n" + presence.network + "\n" +
         presence.address + "\n" + presence.memory;
}

Presence parse_presence(const std::string& text) {
  std::istringstream lines(text);
  Presence presence;
  std::string pid;
  std::getline(lines, presence.host);
  std::getline(lines, pid);
  std::getline(lines, presence.network);
  std::getline(lines, presence.address);
  std::getline(lines, presence.memory);
  presence.pid = std::atoll(pid.c_str());
  return presence;
}

std::string describe(const Presence& presence) {
  return "pid " + std::to_string(presence.pid) + " on host '" + presence.host + "'";
}

std::string describe(const std::map<int64_t, Presence>& by_rank) {
  std::string text;
  size_t named = 0;
  for (const auto& [rank, presence] : by_rank) {
    if (named++ == kNamed) break;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" +
            describe(presence) + ")";
  }
  return text + and_more(by_rank.size());
}

std::string advice_about_threads(const std::vector<Presence>& members, size_t self, int64_t threads,
                                 int64_t cores) {
  int64_t processes = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].host != members[self].host) continue;
    const bool is_thread_beside = i != self && members[i].pid == members[self].pid;
    if (i < self || is_thread_beside) return "";
    ++processes;
  }
  if (processes < 2 || threads < 2 || processes * threads <= cores) return "";
  return std::to_string(processes) + " ranks on host '" + members[self].host + "' compute with " +
         std::to_string(threads) + " threads each on " + std::to_string(cores) +
         " cores, which can take many times as long: set OMP_NUM_THREADS=" +
         std::to_string(std::max<int64_t>(1, cores / processes)) +
         ", or call at::set_num_threads() before the first process group is made";
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text + and_more(ranks.size());
}

}  // namespace fsdp::internal
