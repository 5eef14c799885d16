#include "fully_shard/params/unit_names.h"

#include "fully_shard/params/fsdp_param_group.h"

#include <charconv>
#include <string>
#include <string_view>

namespace fsdp::internal {
namespace {

std::string join(const std::string& path, std::string_view rest) {
  if (path.empty() || rest.empty()) return path + std::string(rest);
  return path + "." + std::string(rest);
}

// The path that stands for "[i]": where the i-th module was met, or the first one.
const std::string& path_of_module(const FoundUnit& found, size_t index) {
  const auto& modules = found.unit->modules();
  const auto module = index < modules.size() ? modules[index].lock() : nullptr;
  const auto met = found.paths.find(module.get());
  return met == found.paths.end() ? found.path : met->second;
}

std::string renamed(const FoundUnit& found, std::string_view name) {
  if (name.empty() || name.front() != '[') return join(found.path, name);
  size_t index = 0;
  const auto* const end = name.data() + name.size();
  const auto* rest = std::from_chars(name.data() + 1, end, index).ptr + 1;  // after "]"
  if (rest < end) ++rest;                                                   // after "."
  return join(path_of_module(found, index), {rest, static_cast<size_t>(end - rest)});
}

}  // namespace

void name_from_above(const FoundUnit& found) {
  for_each_unit_below(*found.unit, [&found](Unit& unit) {
    unit.name = renamed(found, unit.name);
    if (unit.group() == nullptr) return;
    for (auto& param : unit.group()->params()) {
      param.rename(renamed(found, param.name()));
      if (param.storage() != nullptr) param.storage()->renamed();
    }
  });
}

}  // namespace fsdp::internal
