#include "device_mesh/rendezvous/gloo_devices.h"

#include "device_mesh/rendezvous/batch_threads.h"
#include "device_mesh/rendezvous/gloo_address.h"
#include "device_mesh/rendezvous/network.h"
#include "device_mesh/rendezvous/rendezvous.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroupGloo;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Empty for a store that has no host, such as a file.
std::string host_of(StorePtr store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingNonPrefixStore();
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(store.get())) return tcp->getHost();
  return dynamic_cast<c10d::HashStore*>(store.get()) != nullptr ? "localhost" : "";
}

std::vector<std::string> interfaces_of_user() {
  return parse_interface_list(process_environment()("GLOO_SOCKET_IFNAME"));
}

std::string likely_address(const StorePtr& store) {
  const auto interfaces = interfaces_of_user();
  if (!interfaces.empty()) return addresses_of(interfaces, network_interfaces()).front();
  const auto host = host_of(store);
  if (is_loopback(host)) return "127.0.0.1";
  const auto address = address_of_own_name();
  return address.empty() && !host.empty() ? address_towards(host) : address;
}

}  // namespace

Presence presence() { return {host_name(), getpid(), network_identity()}; }

Presence presence_at(const StorePtr& store) {
  auto told = presence();
  told.address = likely_address(store);
  return told;
}

std::string chosen_address(const Presence& own, const std::vector<Presence>& all) {
  const auto present = network_interfaces();
  const auto interfaces = interfaces_of_user();
  if (interfaces.empty()) return gloo_address(own, all, &address_towards, present);
  check_reachable(interfaces, own, all, present);
  return own.address;
}

GlooDevices open_gloo_devices(const std::string& address) {
  const StartsBatchThreads policy;
  const auto interfaces = interfaces_of_user();
  if (interfaces.empty()) return {ProcessGroupGloo::createDeviceForHostname(address)};
  GlooDevices devices;
  for (const auto& name : interfaces)
    devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  return devices;
}

}  // namespace fsdp::internal
