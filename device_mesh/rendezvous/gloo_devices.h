// The Gloo devices of this rank: one per network interface that its connections use.
#pragma once

#include "device_mesh/rendezvous/presence.h"

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Store;
}
namespace gloo::transport {
class Device;
}

namespace fsdp::internal {

using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;

// Where this process runs.
Presence presence();
// With the address by which the ranks that meet in `store` would reach it: that of
// GLOO_SOCKET_IFNAME, the loopback one where the store is at one, that of its host's own
// name, or that from which packets leave for the store. Throws ValueError for an
// interface that is not there.
Presence presence_at(const c10::intrusive_ptr<c10d::Store>& store);

// The address by which this rank connects. Throws ValueError where members on other hosts
// cannot reach this one by any that is known, before anybody connects.
std::string chosen_address(const Presence& own, const std::vector<Presence>& all);
// One device for that address, or one for each interface of GLOO_SOCKET_IFNAME.
GlooDevices open_gloo_devices(const std::string& address);

}  // namespace fsdp::internal
