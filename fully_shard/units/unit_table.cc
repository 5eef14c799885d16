#include "fully_shard/units/unit_table.h"

#include "fully_shard/units/unit.h"

#include <torch/nn/module.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

struct Attached {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<Unit> unit;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, Attached> units;

  void sweep() {
    std::erase_if(units, [](const auto& item) { return item.second.module.expired(); });
  }
};

Table& table() {
  static auto& instance = *new Table();  // leaked: modules may die after static destruction began
  return instance;
}

}  // namespace

std::shared_ptr<Unit> find_unit(const torch::nn::Module& module) {
  std::lock_guard lock(table().mutex);
  const auto found = table().units.find(&module);
  if (found == table().units.end()) return nullptr;
  if (found->second.module.expired()) {
    table().units.erase(found);
    return nullptr;
  }
  return found->second.unit;
}

void attach_unit(torch::nn::Module& module, std::shared_ptr<Unit> unit) {
  std::lock_guard lock(table().mutex);
  table().sweep();
  unit->modules.push_back(module.weak_from_this());
  table().units[&module] = {module.weak_from_this(), std::move(unit)};
}

}  // namespace fsdp::internal
