#include "device_mesh/rendezvous/rendezvous.h"

#include "device_mesh/rendezvous/deadline.h"
#include "device_mesh/rendezvous/network.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace fsdp {
namespace internal {
namespace {

struct Launcher {
  const char* rank;
  const char* world_size;
  const char* local_rank;  // null: the launcher does not tell
};

constexpr std::array<Launcher, 4> kLaunchers{{
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", nullptr},
}};

int64_t parse_integer(const std::string& name, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end && value >= low && value <= high,
                    "environment variable ", name, "='", text, "': expected an integer from ", low,
                    " to ", high);
  return value;
}

// SLURM sets the number of tasks in a batch script too, where nobody has started the
// tasks yet; only a process with a rank counts as launched by it. Every other launcher
// sets both.
bool launched_by(const Launcher& launcher, const Environment& environment) {
  const bool has_rank = environment(launcher.rank).has_value();
  const bool has_size = environment(launcher.world_size).has_value();
  if (has_size && !has_rank && launcher.rank == std::string("SLURM_PROCID")) return false;
  TORCH_CHECK_VALUE(has_rank == has_size, "environment variable ",
                    has_rank ? launcher.rank : launcher.world_size, "='",
                    *environment(has_rank ? launcher.rank : launcher.world_size), "' is set but ",
                    has_rank ? launcher.world_size : launcher.rank,
                    " is not; set both, or neither for a world of one");
  return has_rank;
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Why a connection to the store failed.
struct StoreFailure {
  LaunchEnvironment here;
  bool serves = false;          // this rank listens itself
  bool silent = false;          // what is there took the connection and said nothing
  std::string unresolved = {};  // why MASTER_ADDR does not resolve; empty: it does
  std::string host = {};        // this host's name
  std::string interfaces = {};  // and network interfaces
  std::string reason = {};      // c10d's text; empty: the time was over
};

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

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

LaunchEnvironment parse_launch_environment(const Environment& environment) {
  constexpr int64_t kMaxRanks = 1 << 24;
  LaunchEnvironment here;
  for (const Launcher& launcher : kLaunchers) {
    if (!launched_by(launcher, environment)) continue;
    here.world_size =
        parse_integer(launcher.world_size, *environment(launcher.world_size), 1, kMaxRanks);
    here.rank = parse_integer(launcher.rank, *environment(launcher.rank), 0, here.world_size - 1);
    auto local_rank = launcher.local_rank ? environment(launcher.local_rank) : std::nullopt;
    if (local_rank)
      here.local_rank = parse_integer(launcher.local_rank, *local_rank, 0, here.world_size - 1);
    break;
  }
  here.master_addr = environment("MASTER_ADDR").value_or("");
  if (auto port = environment("MASTER_PORT"))
    here.master_port = parse_integer("MASTER_PORT", *port, 1, 65535);
  return here;
}

StoreHost parse_store_host(const Environment& environment) {
  StoreHost host;
  host.served_by_launcher = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  host.key_prefix = "attempt_" + environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return host;
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

}  // namespace internal

LaunchEnvironment launch_environment() {
  return internal::parse_launch_environment(internal::process_environment());
}

}  // namespace fsdp
