#include "device_mesh/rendezvous/store_connection.h"

#include "device_mesh/rendezvous/deadline.h"
#include "device_mesh/rendezvous/network.h"
#include "device_mesh/rendezvous/rendezvous.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace fsdp::internal {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

constexpr auto kLook = std::chrono::seconds(1);  // for each thing that may not answer either

std::string why_unresolved(const std::string& host) {
  const auto error = call_with_deadline(kLook, [host] { return resolve_error(host); });
  return error ? *error : "its name server does not answer";
}

bool takes_connections(const LaunchEnvironment& here) {
  const auto taken = call_with_deadline(kLook, [host = here.master_addr, port = here.master_port] {
    return accepts_connections(host, port);
  });
  return taken.value_or(false);
}

// Without a reason: when the time was over, nothing had come of the connection yet.
[[noreturn]] void throw_failure(StoreFailure failure) {
  failure.unresolved = why_unresolved(failure.here.master_addr);
  failure.silent =
      failure.reason.empty() && failure.unresolved.empty() && takes_connections(failure.here);
  failure.host = host_name();
  failure.interfaces = describe(network_interfaces());
  C10_THROW_ERROR(DistNetworkError, explain(failure));
}

// Kept for the life of the process: a rank that makes the default group again must not
// meet the server of one that has not destroyed its own yet. Group names in the store
// never repeat.
struct Connections {
  struct Connection {
    StorePtr store;
    bool is_served_here = false;
  };
  std::mutex connecting;  // held for as long as that takes
  std::mutex mutex;
  std::map<std::pair<std::string, int64_t>, Connection> by_address;

  static Connections& get() {
    static auto& connections = *new Connections();
    return connections;
  }
};

const c10d::Store* whole_store(c10d::Store& store) {
  auto* const part = dynamic_cast<c10d::PrefixStore*>(&store);
  return part == nullptr ? &store : part->getUnderlyingNonPrefixStore().get();
}

// The constructor waits without end for the first word of what it has connected to, and
// does not look at the clock while it asks for a name or tries a host that is down.
StorePtr connect(const LaunchEnvironment& here, const c10d::TCPStoreOptions& options) {
  constexpr auto kAnswer = std::chrono::seconds(2);
  StoreFailure failure{.here = here, .serves = options.isServer};
  try {
    const auto store = call_with_deadline(
        options.timeout + kAnswer, [address = here.master_addr, options]() -> StorePtr {
          return c10::make_intrusive<c10d::TCPStore>(address, options);
        });
    if (store) return *store;
  } catch (const c10::Error& error) {
    failure.reason = error.what_without_backtrace();
  }
  throw_failure(std::move(failure));
}

}  // namespace

std::string explain(const StoreFailure& failure) {
  const auto& here = failure.here;
  const auto where = c10::str("MASTER_ADDR=", here.master_addr, ", MASTER_PORT=", here.master_port);
  const auto rank = c10::str("rank ", here.rank, " on host '", failure.host, "'");
  const auto because = failure.reason.empty() ? "" : ": " + failure.reason;
  if (failure.silent)
    return c10::str(rank, " connected to ", where,
                    ", but what listens there has said nothing. As a ",
                    "rule another program has the port (on that host, `ss -ltnp` tells which), or ",
                    "rank 0 is stopped. Give every rank another MASTER_PORT");
  if (failure.serves && contains(failure.reason, "failed to listen"))
    return c10::str("rank ", here.rank, " can not listen at ", where, " on host '", failure.host,
                    "' (another program has the port? give every rank another MASTER_PORT)",
                    because);
  if (!failure.unresolved.empty())
    return c10::str(rank, " can not resolve MASTER_ADDR=", here.master_addr, " (",
                    failure.unresolved,
                    "): give every rank the name or the address of rank 0's host", because);
  if (failure.serves)
    return c10::str(rank, " listens, but can not reach itself at ", where,
                    ": is that this host? It has: ", failure.interfaces, because);
  const auto hint =
      is_loopback(here.master_addr)
          ? " (which is every host itself: with ranks on several hosts, give the name "
            "of rank 0's)"
          : "";
  return c10::str(
      rank, " can not reach rank 0 at ", where, hint,
      ". Look whether rank 0 runs (its own output tells why it ended), whether that is ",
      "its host, and for a firewall between", because);
}

StorePtr connect_rendezvous_store(const LaunchEnvironment& here,
                                  std::chrono::milliseconds timeout) {
  if (here.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  TORCH_CHECK_VALUE(
      !here.master_addr.empty(), "environment variable MASTER_ADDR is not set: a world of ",
      here.world_size,
      " ranks needs the host name of rank 0 there (and MASTER_PORT, default 29500); rank ",
      here.rank);
  auto& connections = Connections::get();
  const std::lock_guard one_at_a_time(connections.connecting);
  const std::pair address(here.master_addr, here.master_port);
  {
    const std::lock_guard lock(connections.mutex);
    const auto kept = connections.by_address.find(address);
    if (kept != connections.by_address.end()) return kept->second.store;
  }
  const StoreHost host = parse_store_host(process_environment());
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(here.master_port);
  options.isServer = here.rank == 0 && !host.served_by_launcher;
  options.numWorkers = static_cast<size_t>(here.world_size);
  options.waitWorkers = false;
  options.timeout = timeout;
  auto store = c10::make_intrusive<c10d::PrefixStore>(host.key_prefix, connect(here, options));
  const std::lock_guard lock(connections.mutex);
  connections.by_address[address] = {store, options.isServer};
  return store;
}

bool is_served_here(c10d::Store& store) {
  auto& connections = Connections::get();
  const std::lock_guard lock(connections.mutex);
  return std::any_of(
      connections.by_address.begin(), connections.by_address.end(), [&](const auto& item) {
        return item.second.is_served_here && whole_store(*item.second.store) == whole_store(store);
      });
}

}  // namespace fsdp::internal
