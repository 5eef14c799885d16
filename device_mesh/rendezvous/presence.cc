#include "device_mesh/rendezvous/presence.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace fsdp::internal {
namespace {

constexpr size_t kNamed = 16;  // of a list; a message is read by people

std::string and_more(size_t count) {
  return count > kNamed ? " and " + std::to_string(count - kNamed) + " more" : "";
}

bool reachable(const std::string& address) { return !address.empty() && !is_loopback(address); }

const Presence* on_another_network(const Presence& own, const std::vector<Presence>& all) {
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const Presence& each) { return each.network != own.network; });
  return found == all.end() ? nullptr : &*found;
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

std::vector<std::string> parse_interface_list(const std::optional<std::string>& variable) {
  std::istringstream list(variable.value_or(""));
  std::vector<std::string> names;
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

std::vector<std::string> addresses_of(const std::vector<std::string>& wanted,
                                      const std::vector<NetworkInterface>& present) {
  std::vector<std::string> addresses;
  for (const auto& name : wanted) {
    const auto found = std::find_if(present.begin(), present.end(),
                                    [&](const auto& each) { return each.name == name; });
    TORCH_CHECK_VALUE(found != present.end(), "GLOO_SOCKET_IFNAME names the network interface '",
                      name, "', which host '", host_name(),
                      "' does not have; it has: ", describe(present));
    TORCH_CHECK_VALUE(!found->addresses.empty(), "GLOO_SOCKET_IFNAME names the network interface '",
                      name, "', which has no address on host '", host_name(),
                      "'; its interfaces are: ", describe(present));
    addresses.push_back(found->addresses.front());
  }
  return addresses;
}

std::string gloo_address(const Presence& own, const std::vector<Presence>& all,
                         const std::function<std::string(const std::string& host)>& towards,
                         const std::vector<NetworkInterface>& present) {
  const auto* other = on_another_network(own, all);
  if (other == nullptr) return own.address.empty() ? "127.0.0.1" : own.address;
  if (reachable(own.address)) return own.address;
  for (const auto& each : all) {
    if (each.network == own.network || !reachable(each.address)) continue;
    const auto address = towards(each.address);
    if (reachable(address)) return address;
  }
  TORCH_CHECK_VALUE(false, "no address is known by which the ranks on host '", other->host,
                    "' reach those on host '", own.host,
                    "': its own name and MASTER_ADDR are loopback addresses here. Set "
                    "GLOO_SOCKET_IFNAME to the network interface by which the hosts reach each "
                    "other; this host has: ",
                    describe(present));
}

void check_reachable(const std::vector<std::string>& interfaces, const Presence& own,
                     const std::vector<Presence>& all,
                     const std::vector<NetworkInterface>& present) {
  const auto* other = on_another_network(own, all);
  if (other == nullptr) return;
  const auto addresses = addresses_of(interfaces, present);
  for (size_t i = 0; i < interfaces.size(); ++i) {
    TORCH_CHECK_VALUE(reachable(addresses[i]), "GLOO_SOCKET_IFNAME names '", interfaces[i],
                      "', whose address ", addresses[i], " on host '", own.host,
                      "' the ranks on host '", other->host,
                      "' can not reach. Name the interface by which the hosts reach each other; "
                      "this host has: ",
                      describe(present));
  }
}

}  // namespace fsdp::internal
