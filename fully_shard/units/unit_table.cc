#include "fully_shard/units/unit_table.h"

#include "fully_shard/units/unit.h"

#include <torch/nn/module.h>

#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// A unit is let go by the thread that attached it: ranks may be threads, and another one
// may be using the unit's root.
struct Attached {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<Unit> unit;
  std::thread::id thread;

  bool may_go() const { return module.expired() && thread == std::this_thread::get_id(); }
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, Attached> units;

  std::vector<Attached> displaced;  // by modules at the addresses of dead ones

  void sweep() {
    std::erase_if(units, [](const auto& item) { return item.second.may_go(); });
    std::erase_if(displaced, [](const auto& attached) { return attached.may_go(); });
  }
};

Table& table() {
  static auto& instance = *new Table();  // leaked: modules may die after static destruction began
  return instance;
}

}  // namespace

std::shared_ptr<Unit> find_unit(const torch::nn::Module& module) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().units.find(&module);
  if (found == table().units.end() || found->second.module.expired()) return nullptr;
  return found->second.unit;
}

void attach_unit(torch::nn::Module& module, std::shared_ptr<Unit> unit) {
  const std::lock_guard lock(table().mutex);
  table().sweep();
  unit->add_module(module.weak_from_this());
  auto& place = table().units[&module];
  if (place.unit && place.module.expired()) table().displaced.push_back(std::move(place));
  place = {module.weak_from_this(), std::move(unit), std::this_thread::get_id()};
}

}  // namespace fsdp::internal
