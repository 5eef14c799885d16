#include "checkpoint/internal/catalog.h"

#include "checkpoint/internal/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExtension = ".safetensors";

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
      places.emplace_back(shard_path(item, written.rank), std::move(written.box));
    }
  }
  for (auto& [name, box] : places) {
    auto number = numbers.number_of(name);
    if (!number.ok()) return number.status();
    stored.boxes.push_back({*number, std::move(box)});
  }
  return stored;
}

std::vector<std::string> safetensors_files(const std::string& path) {
  if (!fs::is_directory(path)) return {path};
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

}  // namespace

absl::StatusOr<Catalog> catalog_of_item(const std::string& folder, const Manifest& manifest,
                                        const std::string& item) {
  Catalog catalog;
  const auto found = manifest.items.find(item);
  if (found == manifest.items.end()) {
    return absl::NotFoundError(folder + " has no '" + item + "'");
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
  Catalog catalog;
  for (const auto& each : safetensors_files(path)) {
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

}  // namespace fsdp::internal::checkpoint
