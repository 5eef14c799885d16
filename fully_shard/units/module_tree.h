// The modules at and below some modules, as every part of fully_shard walks them: depth
// first, a module before its children, children in the order of their registration, and
// each module once, by the first path that leads to it. Not recursive, so depth costs no
// stack.
//
//   const ModuleTree tree({&model});
//   for (size_t i = 0; i < tree.size(); ++i)
//     visit(tree.module(i), tree.path(i), tree.nearest_unit(i));
//
// Local. Keeps no module alive, and is good while the modules register and drop nothing.
#pragma once

#include "fully_shard/units/unit.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {
struct GatherCodec;
}

namespace fsdp::internal {

// What a module is by its C++ type.

std::string module_type_name(const torch::nn::Module& module);
// ModuleList, ModuleDict, ParameterList, ParameterDict: they compute nothing and hold no
// members, so nothing could touch what they register through them.
bool is_container_without_forward(const torch::nn::Module& module);

// A place in a module's parameter registry: what parameters() lists and optimizers see,
// reached past Module's access control, since LibTorch cannot replace a parameter.
//
//   for (const auto& slot : slots_of(module))
//     if (registered(slot).is_same(member)) put(slot, entry);
//
// Local. A slot does not keep its module alive.
struct RegistrySlot {
  torch::nn::Module* module;
  std::string key;  // in the module's registry
};

// The module's own slots, in order of registration, those that hold nothing included.
std::vector<RegistrySlot> slots_of(torch::nn::Module& module);
// Calls visit(key, tensor) for each of them, in place: `visit` must not register.
void for_each_registered(
    torch::nn::Module& module,
    c10::function_ref<void(const std::string& key, const at::Tensor& tensor)> visit);
// What the slot holds, itself, not a copy of the handle; undefined when there is no such
// slot any more.
const at::Tensor& registered(const RegistrySlot& slot);
void put(const RegistrySlot& slot, const at::Tensor& tensor);

class ModuleTree {
 public:
  // kAtUnits: a unit below the starting modules is listed, and what is below it is not.
  enum class Stop { kNowhere, kAtUnits };
  explicit ModuleTree(const std::vector<torch::nn::Module*>& starts, Stop stop = Stop::kNowhere);

  size_t size() const { return places_.size(); }
  torch::nn::Module& module(size_t place) const { return *places_[place].module; }
  bool is_start(size_t place) const { return places_[place].parent == kNone; }
  // REQUIRES: not a start. The place of the module above, and the name it has there.
  size_t parent(size_t place) const { return places_[place].parent; }
  const std::string& key(size_t place) const { return *places_[place].key; }
  // From the starting module, which has "" where there is one, and "[i]" among several.
  std::string path(size_t place) const;
  std::string path_of(size_t place, const std::string& key) const;
  // The unit that was attached to the module itself; null for none.
  const std::shared_ptr<Unit>& unit(size_t place) const { return places_[place].unit; }
  // The unit of the module or of the nearest one above it; null outside of units.
  std::shared_ptr<Unit> nearest_unit(size_t place) const;

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Place {
    torch::nn::Module* module;
    size_t parent;           // in places_; kNone for a start
    const std::string* key;  // in the parent, who owns it; null for a start
    size_t start;            // which of the starting modules is above it
    std::shared_ptr<Unit> unit;
  };

  void push_children(size_t place, std::vector<Place>& waiting) const;

  std::vector<Place> places_;
  bool several_starts_;
};

// What error messages of one call begin and end with: the function and the rank.
struct ErrorContext {
  std::string caller;  // "auto_shard"
  std::string rank;    // " (rank 0)", the message's end; empty where no mesh is known
};

// A distinct parameter with every slot it is registered in.
struct FoundParam {
  at::Tensor tensor;
  std::string path;  // from the unit's module, of its first slot
  std::vector<RegistrySlot> slots;
  size_t model_handles;                                // before the walk made its own
  Shard cut = {};                                      // place_parameters() sets it
  std::shared_ptr<const GatherCodec> codec = nullptr;  // choose_codecs() does

  // By a member, that is, beyond the registry. Handles of the caller count as well.
  bool is_held_by_member() const { return model_handles > slots.size(); }
  // The member of a unit, met under another name: a tie across units.
  bool is_tied_to_a_unit() const;
};

// A nearest unit below, with the path of each of its modules that was met.
struct FoundUnit {
  std::shared_ptr<Unit> unit;
  std::map<const torch::nn::Module*, std::string> paths;
  std::string path;  // of the module that was met first
};

// What one fully_shard call manages: the parameters and buffers at and below its modules
// that no deeper unit manages.
struct ManagedModules {
  std::vector<FoundParam> params;   // in registration order
  std::vector<at::Tensor> buffers;  // distinct, in registration order
  std::vector<FoundUnit> units;     // in pre-order
};

// In the order of ModuleTree. Local.
ManagedModules find_managed(const std::vector<torch::nn::Module*>& modules,
                            const std::vector<at::Tensor>& ignored);

}  // namespace fsdp::internal
