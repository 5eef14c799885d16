#include "checkpoint/format/torch_file/pickled_tensors.h"

#include "checkpoint/format/torch_file/pickled_calls.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using Kind = Pickled::Kind;

bool is_dict(const Pickled* value) { return value != nullptr && value->is(Kind::kDict); }

// (attributes or None, slots)
bool has_slots(const Pickled& state) {
  const auto& parts = state.items;
  return state.is(Kind::kSequence) && parts.size() == 2 && is_dict(parts[1]) &&
         (is_dict(parts[0]) || parts[0]->is(Kind::kNone));
}

constexpr std::string_view kOrderedDict = "collections OrderedDict";

bool is_state_of_module(const Pickled& state) {
  return state.find("_parameters") != nullptr && state.find("_modules") != nullptr;
}

// Of Python, or of TorchScript.
bool is_module(const Pickled& object) {
  return object.callee().starts_with("__torch__") ||
         (object.state != nullptr && is_state_of_module(*object.state));
}

class Walk {
 public:
  PickledTensors run(const Pickled& root) {
    visit(root, "");
    return std::move(found_);
  }

 private:
  static constexpr size_t kDeepest = 512;    // things in one another
  static constexpr int64_t kMost = 1 << 24;  // things looked at

  // An object that refers to one around it, as children do to parents, ends there.
  void visit(const Pickled& value, const std::string& name) {
    count();
    if (open_.size() == kDeepest && holds_tensor(value)) {
      add_unread(name, "nested too deep", /*is_tensor=*/true);
    }
    if (open_.size() == kDeepest || !open_.insert(&value).second) return;
    if (value.is(Kind::kDict)) {
      visit_entries(value, name);
    } else if (value.is(Kind::kSequence)) {
      visit_items(value, name);
    } else if (value.is(Kind::kCall)) {
      visit_call(value, value.callee(), value.items[1]->items, name);
    } else if (value.is(Kind::kSet)) {
      visit_set(value, name);
    } else if (is_storage(value)) {
      add_unread(name, "a storage without a tensor", /*is_tensor=*/true);
    }
    open_.erase(&value);
  }

  void visit_call(const Pickled& value, std::string_view callee,
                  const std::vector<const Pickled*>& arguments, const std::string& name) {
    if (rebuilds_tensor(callee)) {
      add_tensor(callee, arguments, name);
    } else if (passes_on(callee) && !arguments.empty()) {
      visit(*arguments[0], name);
    } else if (rebuilds_subclass(callee) && arguments.size() >= 3 &&
               arguments[0]->is(Kind::kGlobal) && arguments[2]->is(Kind::kSequence)) {
      visit_subclass(value, arguments, name);
    } else if (const auto kind = unread_kind(callee); !kind.empty()) {
      add_unread(name, kind, /*is_tensor=*/true);
    } else if (makes_set(callee)) {
      visit_set(value, name);
    } else if (!makes_value(callee)) {
      visit_object(value, name);
    }
  }

  void visit_set(const Pickled& value, const std::string& name) {
    if (holds_tensor(value)) {
      add_unread(name, "a set, whose tensors have no names", /*is_tensor=*/true);
    }
  }

  void visit_subclass(const Pickled& value, const std::vector<const Pickled*>& arguments,
                      const std::string& name) {
    const std::string_view function = arguments[0]->text;
    if (rebuilds_tensor(function) || passes_on(function)) {
      visit_call(value, function, arguments[2]->items, name);
    } else {
      add_unread(name, "a tensor of the class " + python_name(arguments[1]->text),
                 /*is_tensor=*/true);
    }
  }

  void add_tensor(std::string_view function, const std::vector<const Pickled*>& arguments,
                  const std::string& name) {
    try {
      found_.tensors.push_back(tensor_of(function, arguments, name));
    } catch (const NotRead& why) {
      add_unread(name, std::string("a tensor ") + why.what(), /*is_tensor=*/true);
    }
  }

  void visit_entries(const Pickled& value, const std::string& name) {
    for (const auto& [key, each] : value.entries) {
      if (is_plain(*each)) continue;
      if (key->is(Kind::kString) || key->is(Kind::kInt)) {
        visit(*each, join(name, key->is(Kind::kInt) ? std::to_string(key->integer) : key->text));
      } else if (holds_tensor(*each)) {
        add_unread(join(name, "*"), "under a key that is neither a text nor a number",
                   /*is_tensor=*/true);
      }
    }
  }

  void visit_items(const Pickled& value, const std::string& name) {
    for (size_t i = 0; i < value.items.size(); ++i) {
      if (!is_plain(*value.items[i])) visit(*value.items[i], join(name, std::to_string(i)));
    }
  }

  // A dictionary of another class, a module, what has tensors as attributes, or a tuple
  // with names, which are not in the file: its elements are called by their indices.
  void visit_object(const Pickled& value, const std::string& name) {
    const std::string_view callee = value.callee();
    const std::string what = "an object of " + python_name(callee);
    if (!holds_tensor(value)) {
      const bool is_told = !callee.empty() && callee != kOrderedDict && !is_module(value);
      if (is_told) add_unread(name, what, /*is_tensor=*/false);
      return;
    }
    const size_t before = found_.tensors.size() + found_.unread.size();
    visit_entries(value, name);
    if (callee == kOrderedDict) {
      visit_pairs(value, name);
    } else if (value.is_new) {
      visit_items(*value.items[1], name);
    } else if (holds_tensor(*value.items[1])) {
      add_unread(name, what + ", which is made of tensors", /*is_tensor=*/true);
    }
    if (value.state != nullptr) visit_state(*value.state, name);
    if (found_.tensors.size() + found_.unread.size() == before) {
      add_unread(name, what, /*is_tensor=*/true);
    }
  }

  // Python 2 gave them as an argument.
  void visit_pairs(const Pickled& value, const std::string& name) {
    const auto& arguments = value.items[1]->items;
    if (arguments.empty() || !arguments[0]->is(Kind::kSequence)) return;
    Pickled dict{.kind = Kind::kDict};
    for (const Pickled* pair : arguments[0]->items) {
      if (pair->is(Kind::kSequence) && pair->items.size() == 2) {
        dict.entries.emplace_back(pair->items[0], pair->items[1]);
      }
    }
    visit_entries(dict, name);
  }

  // A dictionary of attributes, or two of them: with slots.
  void visit_state(const Pickled& state, const std::string& name) {
    if (has_slots(state)) {
      for (const Pickled* part : state.items) visit_state(*part, name);
      return;
    }
    if (!is_dict(&state) && state.entries.empty()) {
      if (holds_tensor(state)) {
        add_unread(name, "an object with a state of its own", /*is_tensor=*/true);
      }
      return;
    }
    if (!is_state_of_module(state)) {
      visit_entries(state, name);
      return;
    }
    const Pickled* const parameters = state.find("_parameters");
    const Pickled* const modules = state.find("_modules");
    visit(*parameters, name);
    if (const Pickled* const buffers = state.find("_buffers")) visit(*buffers, name);
    visit(*modules, name);
    for (const auto& [key, each] : state.entries) {
      const bool is_read =
          key->text == "_parameters" || key->text == "_buffers" || key->text == "_modules";
      if (is_read || is_plain(*each) || !holds_tensor(*each)) continue;
      add_unread(join(name, key->text), "neither a parameter nor a buffer", /*is_tensor=*/false);
    }
  }

  // Whether a tensor or a storage lies somewhere in it.
  bool holds_tensor(const Pickled& value) {
    count();
    if (is_storage(value)) return true;
    if (rebuilds_tensor(value.callee()) || !unread_kind(value.callee()).empty()) return true;
    if (is_plain(value) || holding_ > kDeepest) return false;
    const auto [known, is_new] = holds_.emplace(&value, false);
    if (!is_new) return known->second;
    ++holding_;
    bool holds = value.state != nullptr && holds_tensor(*value.state);
    for (size_t i = 0; i < value.items.size() && !holds; ++i) holds = holds_tensor(*value.items[i]);
    for (size_t i = 0; i < value.entries.size() && !holds; ++i) {
      holds = holds_tensor(*value.entries[i].second);
    }
    --holding_;
    return holds_[&value] = holds;
  }

  bool is_plain(const Pickled& value) {
    count();
    return !value.is(Kind::kDict) && !value.is(Kind::kSequence) && !value.is(Kind::kSet) &&
           !value.is(Kind::kCall) && !value.is(Kind::kPersistent);
  }

  void count() {
    if (++seen_ > kMost) throw std::runtime_error("it refers to the same objects too often");
  }

  void add_unread(const std::string& name, std::string what, bool is_tensor) {
    found_.unread.push_back({name, std::move(what), is_tensor});
  }

  static std::string join(const std::string& name, const std::string& key) {
    return name.empty() ? key : name + "." + key;
  }

  PickledTensors found_;
  std::unordered_set<const Pickled*> open_;         // what is being visited
  std::unordered_map<const Pickled*, bool> holds_;  // what holds_tensor() found
  size_t holding_ = 0;
  int64_t seen_ = 0;
};

}  // namespace

PickledTensors tensors_in(const Pickle& pickle) { return Walk().run(*pickle.root()); }

std::map<std::string, PickledStorage> storages_in(const Pickle& pickle) {
  std::map<std::string, PickledStorage> storages;
  for (const Pickled& node : pickle.nodes()) {
    if (!is_storage(node)) continue;
    const StorageReference storage = storage_of(node);
    storages[storage.key] = {element_bytes(storage), storage.numel};
  }
  return storages;
}

}  // namespace fsdp::internal::checkpoint
