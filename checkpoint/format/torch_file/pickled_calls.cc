#include "checkpoint/format/torch_file/pickled_calls.h"

#include "checkpoint/format/dtype.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;
using Kind = Pickled::Kind;

void check(bool condition, const std::string& what) {
  if (!condition) throw NotRead(what);
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), text) != names.end();
}

std::string_view last_word(std::string_view global) {
  return global.substr(global.find_last_of(' ') + 1);
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

}  // namespace

std::string python_name(std::string_view global) {
  std::string name(global);
  std::replace(name.begin(), name.end(), ' ', '.');
  return name;
}

bool rebuilds_tensor(std::string_view callee) {
  return is_one_of(callee, {"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2",
                            "torch._utils _rebuild_tensor_v3"});
}

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

bool passes_on(std::string_view callee) {
  constexpr std::string_view kTuples = "torch.return_types ";  // such as max() returns
  if (callee.starts_with(kTuples)) return true;
  return is_one_of(callee,
                   {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
                    "torch.jit._pickle restore_type_tag", "torch.jit._pickle build_intlist",
                    "torch.jit._pickle build_tensorlist", "torch.jit._pickle build_doublelist",
                    "torch.jit._pickle build_boollist"});
}

bool rebuilds_subclass(std::string_view callee) {
  return is_one_of(callee, {"torch._tensor _rebuild_from_type_v2",
                            "torch._tensor _rebuild_from_type", "torch.tensor _rebuild_from_type"});
}

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

bool is_storage(const Pickled& value) {
  if (!value.is(Kind::kPersistent)) return false;
  const Pickled& id = *value.items[0];
  return id.is(Kind::kSequence) && !id.items.empty() && id.items[0]->text == "storage";
}

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

// (storage, offset, shape, strides[, requires_grad, hooks[, dtype][, metadata]])
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

}  // namespace fsdp::internal::checkpoint
