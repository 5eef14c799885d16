#include "checkpoint/format/catalog/dcp_folder.h"

#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle/pickle.h"

#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;
using Kind = Pickled::Kind;

constexpr const char* kMetadataFile = "/.metadata";

ScalarType dtype_called(const Pickled& value) {
  constexpr std::string_view kTorch = "torch ";
  const std::string_view text = value.text;
  if (text.starts_with(kTorch)) {
    if (const auto dtype = dtype_of_python_name(text.substr(kTorch.size()))) return *dtype;
  }
  throw std::runtime_error("of the dtype '" + value.text + "'");
}

// Attribute `name` of an object; throws where it has none.
const Pickled& attribute(const Pickled& object, std::string_view name) {
  const Pickled* const found = object.state == nullptr ? nullptr : object.state->find(name);
  if (found == nullptr) throw std::runtime_error("without the attribute " + std::string(name));
  return *found;
}

int64_t integer(const Pickled& value) {
  if (!value.is(Kind::kInt) || value.integer < 0) {
    throw std::runtime_error("that has a size or an offset that is no whole number from 0 on");
  }
  return value.integer;
}

// torch.Size((2, 3))
std::vector<int64_t> size_of(const Pickled& value) {
  const bool is_size = value.calls("torch Size") && value.items[1]->items.size() == 1 &&
                       value.items[1]->items[0]->is(Kind::kSequence);
  if (!is_size) throw std::runtime_error("whose shape or offset is no torch.Size");
  std::vector<int64_t> sizes;
  for (const Pickled* each : value.items[1]->items[0]->items) sizes.push_back(integer(*each));
  return sizes;
}

bool is_of_class(const Pickled& value, std::string_view name) {
  return value.is(Kind::kCall) && value.items[0]->is(Kind::kGlobal) &&
         value.items[0]->text.ends_with(name);
}

bool lies_in(const std::vector<int64_t>& offsets, const std::vector<int64_t>& lengths,
             const std::vector<int64_t>& shape) {
  if (offsets.size() != shape.size() || lengths.size() != shape.size()) return false;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (lengths[dim] > shape[dim] || offsets[dim] > shape[dim] - lengths[dim]) return false;
  }
  return true;
}

struct OutsideOfFolder : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Reader {
 public:
  explicit Reader(std::string folder) : folder_(std::move(folder)) {}

  Catalog run(const Pickled& metadata) {
    for (const auto& [name, value] : attribute(metadata, "state_dict_metadata").entries) {
      add_item(name->text, *value);
    }
    for (const auto& [index, info] : attribute(metadata, "storage_data").entries) {
      const std::string& name = attribute(*index, "fqn").text;
      const auto tensor = catalog_.tensors.find(name);
      if (tensor == catalog_.tensors.end()) continue;
      check_file(name, *info);
      try {
        add_box(name, tensor->second, *index, *info);
      } catch (const std::exception& error) {
        catalog_.leave_out(name, std::string("a tensor ") + error.what());
      }
    }
    return std::move(catalog_);
  }

 private:
  void add_item(const std::string& name, const Pickled& value) {
    if (!is_of_class(value, " TensorStorageMetadata")) {
      catalog_.unread.emplace(name, Unread{name, "a pickled value", /*is_tensor=*/false});
      return;
    }
    try {
      add_tensor(name, value);
    } catch (const std::exception& error) {
      catalog_.leave_out(name, std::string("a tensor ") + error.what());
    }
  }

  void add_tensor(const std::string& name, const Pickled& value) {
    const Pickled* const properties = attribute(value, "properties").state;
    if (properties == nullptr || properties->items.empty()) {
      throw std::runtime_error("without a dtype");
    }
    StoredTensor tensor{.dtype = dtype_called(*properties->items[0])};
    tensor.shape = size_of(attribute(value, "size"));
    if (!can_be_shape(tensor.shape)) throw std::runtime_error("of an impossible shape");
    for (const Pickled* chunk : attribute(value, "chunks").items) {
      const auto offsets = size_of(attribute(*chunk, "offsets"));
      lengths_[{name, offsets}] = size_of(attribute(*chunk, "sizes"));
    }
    catalog_.tensors[name] = std::move(tensor);
  }

  void add_box(const std::string& name, StoredTensor& tensor, const Pickled& index,
               const Pickled& info) {
    const auto offsets = size_of(attribute(index, "offset"));
    const std::string& file = attribute(info, "relative_path").text;
    const Pickled* const transforms = info.state->find("transform_descriptors");
    if (transforms != nullptr && !transforms->is(Kind::kNone)) {
      throw std::runtime_error("that was transformed when it was saved");
    }
    const auto lengths = lengths_.find({name, offsets});
    if (lengths == lengths_.end() || !lies_in(offsets, lengths->second, tensor.shape)) {
      throw std::runtime_error("that has a box without lengths or outside of it");
    }
    StoredBox box{.file = file_called(file), .box = box_at(offsets, lengths->second)};
    box.elements.begin = integer(attribute(info, "offset"));
    box.archive_bytes = integer(attribute(info, "length"));
    if (numel_of(box.box) > 0) tensor.boxes.push_back(std::move(box));
  }

  // Such a file is not odd but made to lead elsewhere: nothing of it is read.
  void check_file(const std::string& name, const Pickled& info) const {
    const std::string& file = attribute(info, "relative_path").text;
    if (!stays_in_folder(file)) {
      throw OutsideOfFolder(outside_of_folder(folder_ + kMetadataFile, file, name));
    }
  }

  size_t file_called(const std::string& name) {
    const auto [place, is_new] = files_.try_emplace(name, catalog_.files.size());
    if (is_new) catalog_.files.push_back({.path = folder_ + "/" + name, .has_header = false});
    return place->second;
  }

  const std::string folder_;
  Catalog catalog_;
  std::map<std::pair<std::string, std::vector<int64_t>>, std::vector<int64_t>> lengths_;
  std::map<std::string, size_t> files_;
};

}  // namespace

bool is_dcp_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path + kMetadataFile, error);
}

absl::StatusOr<Catalog> catalog_of_dcp_folder(const std::string& path) {
  const auto bytes = read_file(path + kMetadataFile);
  if (!bytes.ok()) return bytes.status();
  if (auto itself = check_is_itself(*bytes, path + kMetadataFile); !itself.ok()) return itself;
  const auto pickle = Pickle::parse(*bytes, path + kMetadataFile);
  if (!pickle.ok()) return pickle.status();
  try {
    return Reader(path).run(*pickle->root());
  } catch (const OutsideOfFolder& error) {
    return absl::DataLossError(error.what());
  } catch (const std::exception& error) {
    return absl::DataLossError(path + kMetadataFile +
                               ": not the metadata that is known: " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
