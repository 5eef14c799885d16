#include "checkpoint/internal/foreign_files.h"

#include "checkpoint/internal/file_calls.h"
#include "checkpoint/internal/file_format.h"
#include "checkpoint/internal/names.h"
#include "checkpoint/internal/safetensors.h"
#include "checkpoint/internal/stays_in_folder.h"
#include "checkpoint/internal/strict_json.h"
#include "checkpoint/internal/torch_archive.h"
#include "checkpoint/internal/weight_files.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

// The files that an index names; its own path, or that of a folder's.
absl::StatusOr<std::vector<std::string>> files_of_index(const std::string& path) {
  const auto text = read_file(path);
  if (!text.ok()) return text.status();
  const auto json = parse_json(*text, path);
  if (!json.ok()) return json.status();
  const std::string folder = fs::path(path).parent_path().string();
  std::set<std::string> names;
  try {
    for (const auto& [tensor, file] : json->at("weight_map").items()) {
      const auto name = file.get<std::string>();
      if (!stays_in_folder(name)) {
        return absl::DataLossError(outside_of_folder(path, name, tensor));
      }
      names.insert((folder.empty() ? "" : folder + "/") + name);
    }
  } catch (const std::exception& error) {
    return absl::DataLossError(path + ": not an index of weights: " + error.what());
  }
  return std::vector<std::string>(names.begin(), names.end());
}

// Adds one file's entry. A global shape that is not known is what its boxes reach.
void add_entry(Catalog& catalog, const Entry& entry, size_t file) {
  if (!entry.unread.empty()) return catalog.leave_out(entry.tensor, entry.unread);
  if (catalog.unread.count(entry.tensor) != 0) return;
  auto [place, is_new] = catalog.tensors.try_emplace(entry.tensor);
  StoredTensor& stored = place->second;
  if (is_new) stored.dtype = entry.dtype, stored.shape = entry.global_shape;
  if (stored.dtype != entry.dtype || stored.shape.size() != entry.global_shape.size() ||
      (entry.knows_global_shape && !is_new && stored.shape != entry.global_shape)) {
    return catalog.leave_out(entry.tensor, "a tensor that has another dtype or shape in " +
                                               catalog.files[file].path + " than in another file");
  }
  for (size_t dim = 0; dim < stored.shape.size(); ++dim) {
    stored.shape[dim] = std::max(stored.shape[dim], entry.global_shape[dim]);
  }
  stored.boxes.push_back({.file = file, .box = entry.box});
}

absl::Status add_safetensors(Catalog& catalog, const InputFile& file) {
  const auto header = read_header(file);
  if (!header.ok()) return header.status();
  catalog.files.push_back({.path = file.path(), .bytes = file.bytes(), .checksum = {}});
  for (const Entry& entry : header->entries) add_entry(catalog, entry, catalog.files.size() - 1);
  for (const auto& [dropped, kept] : header->metadata) catalog.ties.emplace(dropped, kept);
  return absl::OkStatus();
}

void add_archived(Catalog& catalog, ArchivedTensor tensor, size_t file) {
  if (catalog.unread.count(tensor.name) != 0) return;
  const auto [place, is_new] = catalog.tensors.try_emplace(tensor.name);
  if (!is_new) return catalog.leave_out(tensor.name, "two tensors of one name");
  StoredTensor& stored = place->second;
  stored.dtype = tensor.dtype;
  stored.boxes.push_back({.file = file, .box = whole_box(tensor.shape)});
  stored.shape = std::move(tensor.shape);
  StoredElements& elements = stored.boxes.back().elements;
  elements = {.begin = tensor.begin, .strides = std::move(tensor.strides)};
  elements.conj = tensor.conj, elements.neg = tensor.neg;
}

absl::Status add_archive(Catalog& catalog, const InputFile& file,
                         absl::StatusOr<ArchivedTensors> found) {
  if (!found.ok()) return found.status();
  catalog.files.push_back({.path = file.path(), .bytes = file.bytes(), .has_header = false});
  for (Unread& each : found->unread) {
    if (catalog.tensors.count(each.name) == 0) catalog.unread.emplace(each.name, each);
  }
  for (ArchivedTensor& each : found->tensors) {
    add_archived(catalog, std::move(each), catalog.files.size() - 1);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> beginning_of(const InputFile& file) {
  std::string begin(std::min(kRecognisedBytes, static_cast<size_t>(file.bytes())), '\0');
  const auto read = file.read_at(begin.data(), static_cast<int64_t>(begin.size()), 0);
  if (!read.ok()) return read;
  return begin;
}

absl::Status add_file(Catalog& catalog, const std::string& path) {
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  if (!begin.ok()) return begin.status();
  switch (format_of(*begin)) {
    case FileFormat::kSafetensors:
      return add_safetensors(catalog, *file);
    case FileFormat::kTorchZip:
      return add_archive(catalog, *file, tensors_of_archive(*file, 0, file->bytes()));
    case FileFormat::kTorchLegacy:
      return add_archive(catalog, *file, tensors_of_legacy_file(*file));
    case FileFormat::kJson:
      return absl::DataLossError(path + ": a JSON text, which holds no tensors");
    case FileFormat::kOther:
      break;
  }
  return absl::DataLossError(path + ": " + describe_format(*begin));
}

absl::StatusOr<std::vector<std::string>> files_of_folder(const std::string& path,
                                                         Catalog& catalog) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    names.push_back(entry.path().filename().string());
  }
  WeightFiles found = weight_files(names);
  if (!found.index.empty()) return files_of_index(path + "/" + found.index);
  for (Unread& each : found.variants) catalog.unread.emplace(each.name, each);
  for (std::string& name : found.names) name.insert(0, path + "/");
  if (!found.names.empty()) return std::move(found.names);
  std::sort(names.begin(), names.end());
  return absl::NotFoundError(path + ": neither a checkpoint nor a folder of safetensors files or " +
                             "of torch.save's; it holds " +
                             (names.empty() ? "nothing" : list_of(names)));
}

// One path, or what an index or a folder leads to.
absl::StatusOr<std::vector<std::string>> files_at(const std::string& path, Catalog& catalog) {
  std::error_code error;
  if (fs::is_directory(path, error)) return files_of_folder(path, catalog);
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  if (!begin.ok()) return begin.status();
  if (format_of(*begin) == FileFormat::kJson) return files_of_index(path);
  return std::vector<std::string>{path};
}

}  // namespace

absl::StatusOr<Catalog> catalog_of_foreign_files(const std::string& path) {
  Catalog catalog;
  const auto files = files_at(path, catalog);
  if (!files.ok()) return files.status();
  for (const auto& each : *files) {
    if (auto added = add_file(catalog, each); !added.ok()) return added;
  }
  // Metadata is ties only where it names a tensor.
  std::erase_if(catalog.ties,
                [&](const auto& tie) { return catalog.tensors.count(tie.second) == 0; });
  return catalog;
}

}  // namespace fsdp::internal::checkpoint
