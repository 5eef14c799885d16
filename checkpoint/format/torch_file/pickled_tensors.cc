#include "checkpoint/format/torch_file/pickled_tensors.h"

#include "checkpoint/format/dtype.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;
using Kind = Pickled::Kind;

// What the calls in a pickle make of tensors: which functions of Python's torch and of
// TorchScript rebuild one, from which storage, and which make something that is not read.

// What is wrong with one tensor, behind "a tensor"; the others are read.
struct NotRead : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(bool condition, const std::string& what) {
  if (!condition) throw NotRead(what);
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), text) != names.end();
}

std::string_view last_word(std::string_view global) {
  return global.substr(global.find_last_of(' ') + 1);
}

// "torch._utils _rebuild_tensor_v2" -> "torch._utils._rebuild_tensor_v2"
std::string python_name(std::string_view global) {
  std::string name(global);
  std::replace(name.begin(), name.end(), ' ', '.');
  return name;
}

// Whether a function makes a tensor of a storage.
bool rebuilds_tensor(std::string_view callee) {
  return is_one_of(callee, {"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2",
                            "torch._utils _rebuild_tensor_v3"});
}

// Calls whose results are values like numbers, or sets of them.
bool makes_value(std::string_view callee) {
  return is_one_of(
      callee, {"torch Size", "torch device", "__builtin__ set", "builtins set",
               "__builtin__ frozenset", "builtins frozenset", "_codecs encode", "builtins complex",
               "__builtin__ complex", "builtins slice", "__builtin__ slice"});
}

bool makes_set(std::string_view callee) {
  return is_one_of(
      callee, {"builtins set", "builtins frozenset", "__builtin__ set", "__builtin__ frozenset"});
}

// Calls that give their first argument back, such as that of a parameter or of a tuple
// with names.
bool passes_on(std::string_view callee) {
  constexpr std::string_view kTuples = "torch.return_types ";  // such as max() returns
  if (callee.starts_with(kTuples)) return true;
  return is_one_of(callee,
                   {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
                    "torch.jit._pickle restore_type_tag", "torch.jit._pickle build_intlist",
                    "torch.jit._pickle build_tensorlist", "torch.jit._pickle build_doublelist",
                    "torch.jit._pickle build_boollist"});
}

// Of a subclass of tensors: (function, class, arguments, state).
bool rebuilds_subclass(std::string_view callee) {
  return is_one_of(callee, {"torch._tensor _rebuild_from_type_v2",
                            "torch._tensor _rebuild_from_type", "torch.tensor _rebuild_from_type"});
}

// "a sparse tensor": what a function makes that is not read; empty: no tensor.
std::string unread_kind(std::string_view callee) {
  constexpr std::array<std::pair<std::string_view, const char*>, 6> kKinds = {{
      {"torch._utils _rebuild_sparse_tensor", "a sparse tensor"},
      {"torch._utils _rebuild_sparse_csr_tensor", "a sparse tensor"},
      {"torch._utils _rebuild_nested_tensor", "a nested tensor"},
      {"torch._utils _rebuild_qtensor", "a quantized tensor"},
      {"torch._utils _rebuild_meta_tensor_no_storage", "a tensor of the meta device"},
      {"torch.storage _load_from_bytes", "a storage inside of the pickle"},
  }};
  for (const auto& [name, kind] : kKinds) {
    if (callee == name) return kind;
  }
  const bool rebuilds = callee.starts_with("torch._utils _rebuild_") || rebuilds_subclass(callee);
  return rebuilds ? "a tensor that " + python_name(callee) + " makes" : "";
}

// Of torch.FloatStorage; an untyped storage counts bytes.
ScalarType dtype_of_elements(std::string_view class_name) {
  if (class_name == "UntypedStorage") return ScalarType::Byte;
  const auto dtype = dtype_of_storage_class(class_name);
  check(dtype.has_value(), "of a " + std::string(class_name));
  return *dtype;
}

std::vector<int64_t> integers(const Pickled& value) {
  // torch.Size((2, 3)), or the tuple.
  const Pickled& sequence = value.calls("torch Size") && value.items[1]->items.size() == 1
                                ? *value.items[1]->items[0]
                                : value;
  check(sequence.is(Kind::kSequence), "a shape that is no tuple");
  std::vector<int64_t> values;
  for (const Pickled* item : sequence.items) {
    check(item->is(Kind::kInt) && item->integer >= 0, "a shape with other things than sizes");
    values.push_back(item->integer);
  }
  return values;
}

// Bits that are to be resolved, of which a file may have more than this library knows.
void read_bits(const Pickled& tagged, PickledTensor& tensor) {
  const Pickled& metadata = tagged.untagged();
  if (metadata.is(Kind::kNone)) return;
  check(metadata.is(Kind::kDict), "with metadata that is no dictionary");
  for (const auto& [key, value] : metadata.entries) {
    const bool is_set = value->is(Kind::kBool) && value->integer != 0;
    if (key->text == "conj") {
      tensor.conj = is_set;
    } else if (key->text == "neg") {
      tensor.neg = is_set;
    } else if (is_set) {
      throw NotRead("with the property '" + key->text + "'");
    }
  }
  check(!tensor.conj || c10::isComplexType(tensor.dtype),
        "with the bit of a complex tensor and a real dtype, as LibTorch writes one behind its " +
            std::string("real view"));
}

bool is_storage(const Pickled& value) {
  if (!value.is(Kind::kPersistent)) return false;
  const Pickled& id = *value.items[0];
  return id.is(Kind::kSequence) && !id.items.empty() && id.items[0]->text == "storage";
}

// ("storage", class, key, device, elements[, view]), where a view of the time before 0.4
// is (key, offset, elements) of the storage.
struct StorageReference {
  std::string key = {};
  std::string_view class_name = {};
  int64_t numel = 0;
  int64_t offset = 0;
};

// Throws NotRead.
StorageReference storage_of(const Pickled& value) {
  check(is_storage(value) && value.items[0]->items.size() >= 5, "a storage that is none");
  const auto& id = value.items[0]->items;
  check(id[1]->is(Kind::kGlobal) && (id[2]->is(Kind::kString) || id[2]->is(Kind::kInt)) &&
            id[4]->is(Kind::kInt) && id[4]->integer >= 0,
        "a storage that is not described as torch.save does");
  StorageReference storage;
  storage.key = id[2]->is(Kind::kInt) ? std::to_string(id[2]->integer) : id[2]->text;
  storage.class_name = last_word(id[1]->text);
  storage.numel = id[4]->integer;
  if (id.size() >= 6 && id[5]->is(Kind::kSequence)) {
    const auto& view = id[5]->items;
    check(view.size() == 3 && view[1]->is(Kind::kInt), "a view of a storage that is none");
    storage.offset = view[1]->integer;
    check(storage.offset >= 0, "a view of a storage that is none");
  }
  return storage;
}

// Of the arguments (storage, offset, shape, strides[, requires_grad, hooks[, dtype][,
// metadata]]). Throws NotRead. REQUIRES: rebuilds_tensor(function).
PickledTensor tensor_of(std::string_view function, const std::vector<const Pickled*>& arguments,
                        const std::string& name) {
  check(arguments.size() >= 4 && arguments[1]->is(Kind::kInt) && arguments[1]->integer >= 0,
        "that is not described as torch.save does");
  const StorageReference storage = storage_of(*arguments[0]);
  PickledTensor tensor{.name = name, .storage = storage.key};
  const bool has_dtype = function.ends_with("_v3");
  if (has_dtype) {
    check(arguments.size() >= 7 && arguments[6]->is(Kind::kGlobal), "without a dtype");
    const auto dtype = dtype_of_python_name(last_word(arguments[6]->text));
    check(dtype.has_value(), "of the dtype " + python_name(arguments[6]->text));
    tensor.dtype = *dtype;
  } else {
    tensor.dtype = dtype_of_elements(storage.class_name);
  }
  tensor.shape = integers(*arguments[2]);
  tensor.strides = integers(*arguments[3]);
  check(tensor.shape.size() == tensor.strides.size(), "whose strides do not fit its shape");
  check(!__builtin_add_overflow(storage.offset, arguments[1]->integer, &tensor.offset),
        "whose offset is impossible");
  const size_t metadata = has_dtype ? 7 : 6;
  if (arguments.size() > metadata) read_bits(*arguments[metadata], tensor);
  return tensor;
}

int64_t element_bytes(const StorageReference& storage) {
  if (storage.class_name == "QInt32Storage") return 4;
  if (storage.class_name.starts_with('Q')) return 1;  // of the other quantized ones
  return static_cast<int64_t>(c10::elementSize(dtype_of_elements(storage.class_name)));
}

// The objects of a pickle, from the outermost one on.

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
