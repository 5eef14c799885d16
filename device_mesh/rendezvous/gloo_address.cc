#include "device_mesh/rendezvous/gloo_address.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace fsdp::internal {
namespace {

bool reachable(const std::string& address) { return !address.empty() && !is_loopback(address); }

const Presence* on_another_network(const Presence& own, const std::vector<Presence>& all) {
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const Presence& each) { return each.network != own.network; });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

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
