#include "device_mesh/rendezvous/rendezvous.h"

#include <c10/util/Exception.h>

#include <array>
#include <charconv>
#include <cstdlib>

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

}  // namespace internal

LaunchEnvironment launch_environment() {
  return internal::parse_launch_environment(internal::process_environment());
}

}  // namespace fsdp
