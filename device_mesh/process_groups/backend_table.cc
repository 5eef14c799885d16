#include "device_mesh/process_groups/backend_table.h"

#include "device_mesh/internal/device_types.h"
#include "device_mesh/process_groups/fake_process_group.h"
#include "device_mesh/process_groups/nccl_backend.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

namespace fsdp::internal {
namespace {

struct NamedBackend {
  std::string name;
  BackendEntry entry;
};

// In the order in which they were added; a deque, so that entries stay where they are.
struct BackendTable {
  std::mutex mutex;
  std::deque<NamedBackend> backends;
};

BackendEntry fake_entry() {
  auto types = accelerator_types();
  types.insert(types.begin(), c10::kCPU);
  const auto make = [](const GroupMember& member) {
    return make_fake_backend(member.rank, member.size, member.timeout, member.global_ranks);
  };
  return {.device_types = std::move(types), .make = make, .has_gloo = false};
}

// Leaked: groups may be made and ended while the process ends.
BackendTable& backend_table() {
  static auto& table = *new BackendTable{
      .mutex = {},
      .backends = {
          {"gloo", {}},
          {"nccl",
           {.device_types = {c10::kCUDA}, .make = nccl_factory(), .connect = nccl_connector()}},
          {"fake", fake_entry()}}};
  return table;
}

// Not what reaches it through the Gloo beside it.
bool is_made_for(const BackendEntry& entry, c10::DeviceType type) {
  const auto& types = entry.device_types;
  return std::find(types.begin(), types.end(), type) != types.end();
}

}  // namespace

GroupMember::GroupMember() = default;
GroupMember::GroupMember(const GroupMember&) = default;
GroupMember::~GroupMember() = default;

bool BackendEntry::serves(c10::DeviceType type) const {
  return (type == c10::kCPU && has_gloo) || is_made_for(*this, type);
}

void add_backend(const std::string& name, BackendEntry entry) {
  TORCH_CHECK_VALUE(find_backend(name) == nullptr, "add_backend: '", name,
                    "' is taken; the backends are ", names_of_backends());
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  table.backends.push_back({name, std::move(entry)});
}

const BackendEntry* find_backend(const std::string& name) {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  const auto found = std::find_if(table.backends.begin(), table.backends.end(),
                                  [&](const auto& backend) { return backend.name == name; });
  return found != table.backends.end() ? &found->entry : nullptr;
}

std::string names_of_backends() {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  std::string names;
  for (size_t i = 0; i < table.backends.size(); ++i) {
    if (i > 0) names += i + 1 == table.backends.size() ? " and " : ", ";
    names += "'" + table.backends[i].name + "'";
  }
  return names;
}

std::string backend_for(c10::DeviceType type) {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  for (const auto& [name, entry] : table.backends) {
    if (entry.has_gloo && entry.is_in_this_build() && is_made_for(entry, type)) return name;
  }
  return "gloo";
}

}  // namespace fsdp::internal
