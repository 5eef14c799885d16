#include "device_mesh/rendezvous/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>

namespace fsdp::internal {
namespace {

// Empty for other families, and for the link-local addresses of IPv6, which mean nothing
// without the interface.
std::string address_text(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address->sa_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(address);
    inet_ntop(AF_INET, &four->sin_addr, text.data(), text.size());
  } else if (address->sa_family == AF_INET6) {
    const auto* six = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) return "";
    inet_ntop(AF_INET6, &six->sin6_addr, text.data(), text.size());
  }
  return text.data();
}

struct Resolved {
  int error = 0;
  std::shared_ptr<addrinfo> first = nullptr;
};

Resolved resolve(const std::string& host, int type = SOCK_DGRAM, int64_t port = 9) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return {error};
  return {0, std::shared_ptr<addrinfo>(found, &freeaddrinfo)};
}

std::string first_line_of(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Connecting a datagram socket chooses the way and sends nothing.
std::string source_address(const addrinfo& target) {
  const int fd = socket(target.ai_family, SOCK_DGRAM, 0);
  if (fd < 0) return "";
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  const bool known = connect(fd, target.ai_addr, target.ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0;
  close(fd);
  return known ? address_text(reinterpret_cast<const sockaddr*>(&own)) : "";
}

}  // namespace

std::vector<NetworkInterface> network_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  std::vector<NetworkInterface> interfaces;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if ((each->ifa_flags & IFF_UP) == 0) continue;
    const std::string name = each->ifa_name;
    auto place = std::find_if(interfaces.begin(), interfaces.end(),
                              [&](const NetworkInterface& known) { return known.name == name; });
    if (place == interfaces.end()) place = interfaces.insert(place, {name, {}});
    const auto address = each->ifa_addr == nullptr ? "" : address_text(each->ifa_addr);
    if (!address.empty()) place->addresses.push_back(address);
  }
  freeifaddrs(first);
  return interfaces;
}

std::string describe(const std::vector<NetworkInterface>& interfaces) {
  std::string text;
  for (const auto& interface : interfaces) {
    text += (text.empty() ? "" : ", ") + interface.name;
    for (const auto& address : interface.addresses) text += " " + address;
  }
  return text;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "?";
  return name.data();
}

std::string network_identity() {
  std::array<char, 64> space{};
  const auto length = readlink("/proc/self/ns/net", space.data(), space.size());
  return first_line_of("/proc/sys/kernel/random/boot_id") + " " +
         std::string(space.data(), static_cast<size_t>(std::max<ssize_t>(length, 0)));
}

bool is_loopback(const std::string& host) {
  in_addr four{};
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
  return host == "localhost" || host == "::1";
}

std::string resolve_error(const std::string& host) {
  const int error = resolve(host).error;
  return error == 0 ? "" : gai_strerror(error);
}

bool accepts_connections(const std::string& host, int64_t port) {
  const auto found = resolve(host, SOCK_STREAM, port);
  for (const auto* each = found.first.get(); each != nullptr; each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_STREAM, 0);
    if (fd < 0) continue;
    const bool taken = connect(fd, each->ai_addr, each->ai_addrlen) == 0;
    close(fd);
    if (taken) return true;
  }
  return false;
}

std::string address_of_own_name() {
  const auto interfaces = network_interfaces();
  const auto is_own = [&](const std::string& address) {
    return std::any_of(interfaces.begin(), interfaces.end(), [&](const auto& interface) {
      const auto& own = interface.addresses;
      return std::find(own.begin(), own.end(), address) != own.end();
    });
  };
  const auto found = resolve(host_name());
  for (const auto* each = found.first.get(); each != nullptr; each = each->ai_next) {
    const auto address = address_text(each->ai_addr);
    if (!address.empty() && !is_loopback(address) && is_own(address)) return address;
  }
  return "";
}

std::string address_towards(const std::string& host) {
  const auto found = resolve(host);
  for (const auto* each = found.first.get(); each != nullptr; each = each->ai_next) {
    const auto address = source_address(*each);
    if (!address.empty()) return address;
  }
  return "";
}

}  // namespace fsdp::internal
