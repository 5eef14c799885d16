// Which modules are managed, and by which unit: for exporters, tracers and profilers,
// which walk a model without knowing how it was sharded.
//
//   for (const auto& mark : fsdp::annotations(*model))
//     std::cout << "'" << mark.path << "' is of unit '" << mark.unit.name() << "'\n";
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"
#include "fully_shard/fsdp_module.h"

#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

namespace internal {
class ModulePaths;
}

// The names that lead to a module, "blocks.0.norm", made when they are asked for: those
// of a chain of modules are together as long as the square of its depth. A value, good
// without the modules; copies share what they know.
class FSDP_API ModulePath {
 public:
  ModulePath(std::shared_ptr<const internal::ModulePaths> paths, size_t place);

  std::string str() const;
  operator std::string() const { return str(); }
  friend bool operator==(const ModulePath& path, std::string_view text) {
    return path.str() == text;
  }
  friend std::ostream& operator<<(std::ostream& out, const ModulePath& path) {
    return out << path.str();
  }

 private:
  std::shared_ptr<const internal::ModulePaths> paths_;
  size_t place_;
};

struct ModuleAnnotation {
  const torch::nn::Module* module;  // not kept alive
  ModulePath path;                  // from the module that was asked for; "" for itself
  FSDPModule unit;                  // that manages it
};

// One for every managed module at and below `module`, each once, in pre-order, children
// as registered. Its unit is the nearest one at or above it; of several, the one that is
// met first. Ignorable modules have none: those without buffers, without parameters but
// such as fully_shard was told to ignore, and with nothing but ignorable modules below
// them (activations, an ignored subtree). Units above `module` are not known to it, so
// ask the whole model. Local; takes time and memory in proportion to the modules, however
// they are shared and however deep they are.
[[nodiscard]] FSDP_API std::vector<ModuleAnnotation> annotations(ConstModuleRef module);

}  // namespace fsdp
