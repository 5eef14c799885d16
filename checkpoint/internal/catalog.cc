#include "checkpoint/internal/catalog.h"

#include "checkpoint/internal/dcp_folder.h"
#include "checkpoint/internal/file_calls.h"
#include "checkpoint/internal/safetensors.h"
#include "checkpoint/internal/strict_json.h"
#include "checkpoint/internal/torch_archive.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExtension = ".safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

// The files of one item, numbered as they are first named.
class FileNumbers {
 public:
  FileNumbers(const std::string& folder, const Manifest& manifest, Catalog& catalog)
      : folder_(folder), manifest_(manifest), catalog_(catalog) {}

  absl::StatusOr<size_t> number_of(const std::string& name) {
    if (const auto known = numbers_.find(name); known != numbers_.end()) return known->second;
    const auto record = manifest_.files.find(name);
    if (record == manifest_.files.end()) {
      return absl::DataLossError(folder_ + ": the manifest does not list the file " + name);
    }
    catalog_.files.push_back({folder_ + "/" + name, record->second.bytes, record->second.checksum});
    return numbers_[name] = catalog_.files.size() - 1;
  }

 private:
  const std::string& folder_;
  const Manifest& manifest_;
  Catalog& catalog_;
  std::map<std::string, size_t> numbers_;
};

absl::StatusOr<StoredTensor> stored_tensor(const TensorRecord& record, const std::string& item,
                                           const Manifest& manifest, FileNumbers& numbers) {
  StoredTensor stored{.dtype = record.dtype, .shape = record.shape};
  std::vector<std::pair<std::string, Box>> places;
  if (record.layout < 0) {
    places.emplace_back(record.file, whole_box(record.shape));
  } else {
    const SavedLayout& layout = manifest.layouts[static_cast<size_t>(record.layout)];
    for (auto& written : written_boxes(layout, record.shape, record.replica)) {
      places.emplace_back(shard_path(item, written.rank, written.number), std::move(written.box));
    }
  }
  for (auto& [name, box] : places) {
    auto number = numbers.number_of(name);
    if (!number.ok()) return number.status();
    stored.boxes.push_back({*number, std::move(box)});
  }
  return stored;
}

// The files that an index of Hugging Face's names: others in the folder are other copies.
absl::StatusOr<std::vector<std::string>> files_of_index(const std::string& folder) {
  const std::string path = folder + "/" + kIndexName;
  const auto text = read_file(path);
  if (!text.ok()) return text.status();
  const auto json = parse_json(*text, path);
  if (!json.ok()) return json.status();
  std::set<std::string> names;
  try {
    for (const auto& [tensor, file] : json->at("weight_map").items()) {
      names.insert(folder + "/" + file.get<std::string>());
    }
  } catch (const std::exception& error) {
    return absl::DataLossError(path + ": not an index of weights: " + error.what());
  }
  return std::vector<std::string>(names.begin(), names.end());
}

absl::StatusOr<std::vector<std::string>> safetensors_files(const std::string& path) {
  if (!fs::is_directory(path)) return std::vector<std::string>{path};
  auto indexed = files_of_index(path);
  if (!absl::IsNotFound(indexed.status())) return indexed;
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name[0] != '.' && entry.path().extension() == kExtension) {
      files.push_back(entry.path().string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Adds one file's entry. A global shape that is not known is what its boxes reach.
absl::Status add_entry(Catalog& catalog, const Entry& entry, size_t file) {
  auto [place, is_new] = catalog.tensors.try_emplace(entry.tensor);
  StoredTensor& stored = place->second;
  if (is_new) stored.dtype = entry.dtype, stored.shape = entry.global_shape;
  if (stored.dtype != entry.dtype || stored.shape.size() != entry.global_shape.size() ||
      (entry.knows_global_shape && !is_new && stored.shape != entry.global_shape)) {
    return absl::DataLossError(catalog.files[file].path + ": entry '" + entry.name +
                               "' has another dtype or shape than in another file");
  }
  for (size_t dim = 0; dim < stored.shape.size(); ++dim) {
    stored.shape[dim] = std::max(stored.shape[dim], entry.global_shape[dim]);
  }
  stored.boxes.push_back({file, entry.box});
  return absl::OkStatus();
}

absl::StatusOr<Catalog> catalog_of_safetensors(const std::string& path) {
  Catalog catalog;
  const auto files = safetensors_files(path);
  if (!files.ok()) return files.status();
  for (const auto& each : *files) {
    auto file = InputFile::open(each);
    if (!file.ok()) return file.status();
    auto header = read_header(*file);
    if (!header.ok()) return header.status();
    catalog.files.push_back({.path = each, .bytes = file->bytes(), .checksum = {}});
    for (const Entry& entry : header->entries) {
      if (auto added = add_entry(catalog, entry, catalog.files.size() - 1); !added.ok()) {
        return added;
      }
    }
    for (const auto& [dropped, kept] : header->metadata) catalog.ties.emplace(dropped, kept);
  }
  if (catalog.files.empty()) {
    return absl::NotFoundError(path + ": neither a checkpoint nor a folder of safetensors files");
  }
  // Metadata is ties only where it names a tensor.
  std::erase_if(catalog.ties,
                [&](const auto& tie) { return catalog.tensors.count(tie.second) == 0; });
  return catalog;
}

// "PK" and a local file header: a zip archive.
bool is_archive(const InputFile& file) {
  constexpr std::string_view kMagic = "PK\3\4";
  char begin[kMagic.size()] = {};
  return file.read_at(begin, sizeof(begin), 0).ok() &&
         std::string_view(begin, sizeof(begin)) == kMagic;
}

absl::StatusOr<Catalog> catalog_of_archive(const InputFile& file) {
  auto tensors = tensors_of_archive(file, 0, file.bytes());
  if (!tensors.ok()) return tensors.status();
  Catalog catalog;
  catalog.files.push_back({.path = file.path(), .bytes = file.bytes(), .has_header = false});
  for (ArchivedTensor& each : *tensors) {
    StoredTensor& stored = catalog.tensors[each.name];
    stored = {.dtype = each.dtype, .shape = each.shape};
    stored.boxes.push_back({.box = whole_box(each.shape), .begin = each.begin});
  }
  return catalog;
}

}  // namespace

absl::StatusOr<Catalog> catalog_of_item(const std::string& folder, const Manifest& manifest,
                                        const std::string& item) {
  Catalog catalog;
  const auto found = manifest.items.find(item);
  if (found == manifest.items.end()) {
    return absl::NotFoundError("the checkpoint has no '" + item + "'");
  }
  catalog.ties = found->second.ties;
  FileNumbers numbers(folder, manifest, catalog);
  for (const auto& [name, record] : found->second.tensors) {
    auto stored = stored_tensor(record, item, manifest, numbers);
    if (!stored.ok()) return stored.status();
    catalog.tensors.emplace(name, *std::move(stored));
  }
  return catalog;
}

absl::StatusOr<Catalog> catalog_of_files(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return is_dcp_folder(path) ? catalog_of_dcp_folder(path) : catalog_of_safetensors(path);
  }
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  return is_archive(*file) ? catalog_of_archive(*file) : catalog_of_safetensors(path);
}

}  // namespace fsdp::internal::checkpoint
