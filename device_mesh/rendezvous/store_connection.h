// The store at MASTER_ADDR and MASTER_PORT, in which the processes of a job find each
// other. Rank 0 serves it, unless a launcher does.
#pragma once

#include "device_mesh/process_group.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

namespace c10d {
class Store;
}

namespace fsdp::internal {

// Kept for the life of the process, one per address. Returns or throws within `timeout`
// and 4 s. Throws ValueError without MASTER_ADDR, and DistNetworkError that tells apart a
// name that does not resolve, a taken port, nobody there and somebody who does not speak.
c10::intrusive_ptr<c10d::Store> connect_rendezvous_store(const LaunchEnvironment& here,
                                                         std::chrono::milliseconds timeout);
// Whether this process serves that store, or the one that it is a part of, because
// connect_rendezvous_store() made it do so. Local.
bool is_served_here(c10d::Store& store);

// Why that failed, in words, for the pure part of it.
struct StoreFailure {
  LaunchEnvironment here;
  bool serves = false;          // this rank listens itself
  bool silent = false;          // what is there took the connection and said nothing
  std::string unresolved = {};  // why MASTER_ADDR does not resolve; empty: it does
  std::string host = {};        // this host's name
  std::string interfaces = {};  // and network interfaces
  std::string reason = {};      // c10d's text; empty: the time was over
};
std::string explain(const StoreFailure& failure);

}  // namespace fsdp::internal
